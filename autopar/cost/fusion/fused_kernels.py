"""All kernels that torch.compile generates for a microbatch."""

from __future__ import annotations

from autopar.cost.fusion.backward import backward_kernels
from autopar.cost.fusion.forward import forward_kernels
from autopar.cost.fusion.fused_graph import FusedGraph
from autopar.cost.fusion.kernel import FusedKernel
from autopar.cost.fusion.layer_copies import layer_copies, padded_groups, padded_images, product_copies
from autopar.cost.fusion.pooling import pooling_kernels
from autopar.cost.ops.op_stats import GraphStats
from autopar.ir.graph import Graph


def fused_kernels(graph: Graph, eager: GraphStats, stats: GraphStats) -> tuple[FusedKernel, ...]:
    """The generated kernels of a microbatch's forward and backward, without those of external operations.

    Sums over rows for gradients of weights are not among them; `autopar.cost.fusion.traffic` counts their traffic.

    Args:
        eager: statistics of this graph: what each operation's backward needs.
        stats: as ``eager``, but with what compiled regions save.
    Error: kernels of two blocks of each model in docs/benchmarks/h100-x1-kernels-*.json agree, but torch materialises
        some gradients of rotary embeddings that are not written here.
    """
    fused = FusedGraph(graph, eager, stats)
    copies = (*layer_copies(fused), *product_copies(fused), *padded_images(fused), *padded_groups(fused))
    return (*forward_kernels(fused), *backward_kernels(fused), *pooling_kernels(fused), *copies)
