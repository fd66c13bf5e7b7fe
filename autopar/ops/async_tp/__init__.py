"""Linear layers and the collective before or behind them as one operator: what travels does so beside a product.

Results are those of the collective and ``aten.linear`` of real numbers, but for how products of fewer rows round.

| operator | is | beside |
|---|---|---|
| gathered_linear(x, weight, bias, dim, outer, ranks, axis) | all_gather, then linear | gradient of x, the weight's |
| summed_linear(x, weight, bias, axis) | sum_gradient, then linear | gradient of x, the weight's |
| gathered_rows_linear(x, weight, bias, ranks, axis) | the first, along the first dim | also rows of x, own ones |
| scattered_rows_linear(x, weight, bias, ranks, axis) | linear, then reduce_scatter | others' rows, own ones |
"""
