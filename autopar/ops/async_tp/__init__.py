"""Async tensor parallelism: a linear layer and the collective before or after it as one operator that overlaps them.

Results equal the collective and ``aten.linear`` of real numbers, except for rounding in products of fewer rows.

| operator | is | the collective overlaps with |
|---|---|---|
| gathered_linear(x, weight, bias, dim, outer, ranks, axis) | all_gather, then linear | backward: the wgrad matmul |
| summed_linear(x, weight, bias, axis) | sum_gradient, then linear | backward: the wgrad matmul |
| gathered_rows_linear(x, weight, bias, ranks, axis) | all_gather of rows, then linear | also products of rows |
| scattered_rows_linear(x, weight, bias, ranks, axis) | linear, then reduce_scatter of rows | products of rows |

`autopar.codegen.fusions.async_tp` puts them into programs.

Read side_stream (the CUDA stream of the collectives), input_grad (the first two), rows (the last two).
"""
