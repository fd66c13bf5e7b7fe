"""Sharding rules: which dims of an operation can be split over ranks, as one line of text or a function of its shapes.

Question: which graph does every rank of a tensor-parallel group run? Input: a `Graph`, a label per operation, a layout
per weight. Output: the local `Graph`, with collectives as operations. To split one letter of a rule is a strategy.
Operands with the letter are split. Operands without it are read whole, and their gradient is a sum over ranks; an
output without it is a partial sum itself. Only sizes that divide evenly are split.

On several axes the graph is sharded over one after the other; collectives of the outer ones have rules too.

Read rule (rules, strategies, layouts), table with parse and functions (the rule of every operator), bound_call and
lookup (the rule of one operation), propagate (the strategy of every operation), reshard (collectives between two
layouts), local_op, localise, localise_space and shard_graph (the local graph), exchanges (collectives inside of
operations on parts of pictures), fuse_linear and buffer_sizes (async tensor parallelism and its
buffers), batch_dim (where the samples lie), batch_join (how a batch's values follow from its microbatches'), outputs
(joined by it), tensors (cutting and joining whole tensors).

>>> k = strategy(rule, "k", 2)  # rule of aten.linear: ``... k, n k, +n -> ... n``, x [8, 16, 32], weight [64, 32]
>>> [str(layout) for layout in (*k.operands, *k.outputs)]
['tp:2', 'tp:1', 'tp:sum', 'tp:sum']
"""
