"""What does a group of operations cost? Operations that always share a stage are one node of the cost graph.

Input is a graph with the costs of its operations; output is an `ir.cost_graph.CostGraph`. In reading order:

- `grouping`: which operations form a group.
- `cost_graph`: `price`: seconds, saved bytes and edges of all groups.
- `weight_memory`: bytes and seconds per step of weights, gradients and optimizer state.
- `param_gathers`: what each microbatch waits for gathers of sharded parameters.
- `saved_activations`: activations that torch.compile saves instead of those that eager autograd saves.
- `recompute_segments`: where checkpointed segments begin.
- `segment_memory`: `with_segments`: what groups keep and restore where segments recompute.
"""
