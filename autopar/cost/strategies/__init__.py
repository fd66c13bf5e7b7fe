"""How can each group be sharded, and what does that cost? Alpa's strategies of the nodes of a graph.

Input is a `Pricing` of the unsharded graph on some ranks; output is an `ir.strategies.StrategyGraph`. In reading order:

- `rule_cache`: sharding rules of the operations, each distinct one looked up once.
- `candidate_splits`: splits of values that later operations can use, or earlier ones can make.
- `propagate`: strategies of a group's anchor, and how the group's other operations follow it.
- `group_cost`: the cost of one sharding of a group.
- `enumerate`: the strategies of all groups, and the costs of resharding between them.
- `describe`: shardings in words, for printed plans.
"""
