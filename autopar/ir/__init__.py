"""Every frozen type that crosses stages, its invariants and its printed form.

Question: in which words do the stages talk? Tracing gives a `Graph`, cost a `CostGraph` and a `StrategyGraph`, the
solver a `Plan`, code generation a `Program` per stage. Nothing here computes with tensors or talks to other ranks.

Read graph (operations, weights, values), layout, tensor_axes and mesh (where tensors and ranks lie), hardware with
network (seconds of operations, collectives, messages), activation, cost_graph and strategies (input of the solver),
plan with plan_parts, plan_invariants and plan_stages, program, then table and sharding_table (`print(plan)`). Helpers:
names, blocks, units, text, html, notebook, terminal, status, microbatches, pytree, comm_sizes,
grad_buckets, checkpoint_header, files.

>>> from autopar.ir.layout import Layout
>>> Layout.parse("tp:0x3").local_shape([2304, 768], {"tp": 2})
(1152, 768)
>>> print(Layout.parse("tp:1 dp:gradient"))
tp:1 dp:gradient
"""
