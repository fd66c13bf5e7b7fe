"""Which kernels does torch.compile generate between products, and what do they move?

Input is a graph with its statistics, eager and compiled; output is a tuple of `kernel.FusedKernel`, from which
`traffic.fused_traffic` makes each operation's share of memory traffic. In reading order:

- `kernel`: a kernel, its accesses to tensors, and which kernels become one.
- `fused_graph`: the graph with its regions, and the operations that libraries compute ("external").
- `forward`, `backward`: kernels of either direction.
- `pooling`: kernels of pooling by windows.
- `layer_copies`: copies of operands that products and convolutions need in another layout or with padding.
- `fused_kernels`: all kernels of a microbatch.
- `traffic`: bytes by operation, with the slowdowns of generated kernels.
- `least_kernels`: the part of that traffic that no sharding of other operations saves.

    >>> for kernel in fused_kernels(graph, graph_stats(graph), compiled_stats(graph, graph_stats(graph))): print(kernel)
    forward blocks.0.add blocks.0.norm2.layer_norm: reads 2, writes 1
"""
