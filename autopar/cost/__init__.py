"""What does a model cost on a machine? A graph and a cost model become seconds and bytes of groups of operations.

Input is an `ir.graph.Graph`, an `ir.hardware.Hardware` and a microbatch size. Output is an `ir.cost_graph.CostGraph`
for pipeline cuts, and an `ir.strategies.StrategyGraph` for tensor parallelism.

- `hardware`: a machine from a file of cost_models/.
- `ops`: one operation: FLOPs and saved tensors (`op_stats`), then its seconds and bytes (`op_cost`).
- `fusion`: kernels that compiled code has between products, and what they move.
- `groups`: operations that share a stage (`grouping`), and the costs of groups (`cost_graph`).
- `strategies`: the ways to shard each group (`enumerate`), and their costs (`group_cost`).

A two-layer perceptron on an H100, 4096 samples in float32: forward, backward, saved bytes; then strategies for tp 2::

    >>> stats, hardware = graph_stats(graph), load_hardware("h100-nvlink")
    >>> for g in price(Pricing(graph, stats, hardware, 4096)).groups: print(...)
    0.linear   702 us  751 us   16 MiB
    1.gelu      55 us   79 us   64 MiB
    2.linear   702 us 1435 us   64 MiB
    loss         0 us    0 us    0 MiB
    >>> for g in strategy_graph(Pricing(graph, stats, hardware, 4096, ranks=2)).groups: print(...)
    0.linear  replicated 1453 us, n 748 us, k → replicated 1010 us, k → tp:1 1038 us, k → tp:0 1038 us
    1.gelu    replicated 134 us, d1 75 us, d0 75 us
    2.linear  replicated 2137 us, n 1099 us, k → replicated 1188 us, k → tp:0 1216 us
    loss      replicated 0 us
"""
