"""How is a traced graph rewritten? Each pass takes an `ir.graph.Graph` and returns one; `trace.lower` orders them.

- `precision`: the precision of a model, and whether a wanted one needs a rewrite.
- `bf16_params`: parameters as bfloat16 compute copies of FP32 masters.
- `autocast`, `autocast_policy`: mixed precision as explicit casts; which operations it casts.
- `counter_rng`, `rewrite`: random operations as functions of counters; one operation replaced by several.
"""
