"""How does a stage run? A graph and the stage of each operation become programs, each an ``fx.GraphModule``.

Input is an `ir.graph.Graph` (of one rank, after sharding) with a stage per operation. Output is an `ir.program.Program`
per stage, and for each a module that takes the program's arguments and returns its results.

- `split`: the programs; stages of another trace (eval mode, another shape) of a planned model.
- `emit`: a program as a module, and as readable Python.
- `regions`, `compile`: what torch.compile compiles as one region; equal regions share one compilation.
- `collective_order`: compiled ranks of unequal shapes call collectives in one order.
- `activation_checkpoint`: checkpointed segments, whose backward runs their forward again.
- `fusions`: operations of compiled programs that are replaced by faster ones.

::

    >>> first, last = split(graph, {"0.linear": 0, "1.relu": 1, "2.linear": 1}, 2)
    >>> print(source(first))
    # stage 0, train, microbatch of 2: 1 operations, 40 parameters in 2 tensors
    # input   input: float32[2, 4]
    # to stage 1: 0.linear: float32[2, 8]
    def forward(self, input):
        input_1 = input
        _0_weight = getattr(self, "0").weight
        _0_bias = getattr(self, "0").bias
        _0_linear = torch.ops.aten.linear.default(input_1, _0_weight, _0_bias);  input_1 = _0_weight = _0_bias = None
        return (_0_linear,)
"""
