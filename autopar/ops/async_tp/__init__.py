"""Async tensor parallelism: a linear layer and the collective before or after it as one operator that overlaps them.

Results equal the collective and ``aten.linear`` of real numbers, except for rounding in products of fewer rows.

| operator | is | the collective overlaps with |
|---|---|---|
| all_gather_linear(x, weight, bias, dim, outer, ranks, axis) | all_gather, then linear | backward: the wgrad matmul |
| linear_with_async_grad_allreduce(x, weight, bias, axis) | sum_gradient, then linear | backward: the wgrad matmul |
| pipelined_all_gather_linear(x, weight, bias, ranks, axis) | all_gather (rows), then linear | also matmuls of rows |
| pipelined_linear_reduce_scatter(x, weight, bias, ranks, axis) | linear, then reduce_scatter (rows) | matmuls of rows |

`autopar.codegen.fusions.async_tp` puts them into programs.

Read side_stream (the CUDA stream of the collectives), input_grad (the first two), pipelined (the last two).
"""
