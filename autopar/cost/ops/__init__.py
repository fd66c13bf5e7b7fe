"""What does one operation cost? Statistics that hold on every machine, then seconds and bytes on one machine.

Input is a graph; output is an `op_cost.OpCost` for each operation. In reading order:

- `op_stats`: FLOPs, saved tensors and views, from a run on meta tensors.
- `op_cost`: `Pricing` (what is priced) and the roofline price of an operation or of a rank's part of it.
- `memory_traffic`: second passes over memory, and the accumulation into main gradients.
- `kernel_shapes`: slowdowns of products and attention by the shapes of their operands.
- `unfused_attention`: attention for which a GPU has no fused kernel.
- `fused_cost`: seconds of an operation's part in fused kernels.
- `collective_cost`: seconds of resharding steps.
- `overlap`: exposed seconds of collectives that async tensor parallelism overlaps with linear layers.
"""
