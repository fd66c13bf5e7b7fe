"""Which operations does a model run? An unmodified ``nn.Module`` and a call become an `ir.graph.Graph`.

Input is a model, a `call.Call` at the microbatch size, a mode and a precision; output is a graph of ATen operations.

- `lower`: `lower_model`, the whole room in one function: the trace, then every rewrite of it in order.
- `call`: a call's arguments in the signature's order; which of them are batched.
- `trace`: torch.export's placeholders become inputs and weights, its nodes operations.
- `export`, `hooks`, `finite`, `fake`, `frames`, `copy_model`, `forward_error`: the export, what it would lose, branches
  on whether activations are finite, errors with the user's line, and errors that a model raises itself.
- `shared_memory`, `python_state`: refusals of weights that overlap in memory, and of Python state that forwards change.
- `caches`: sets caches back that a forward filled.
- `convert`, `inplace`, `autocast`, `masks`: nodes to operations; side effects, autocast regions, trivial masks.
- `passes`: rewrites of the graph: low-precision parameters, autocast, counter-based random numbers.

::

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> print(lower_model(model, as_call(model, torch.randn(2, 4)), "train", "mlp"))
    mlp (train, batch 2): 3 ops, 58 parameters
      0.linear: float32[2, 8] = aten.linear.default(%input, %0.weight, %0.bias)
      1.relu: float32[2, 8] = aten.relu.default(%0.linear)
      2.linear: float32[2, 2] = aten.linear.default(%1.relu, %2.weight, %2.bias)
"""
