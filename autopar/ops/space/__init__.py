"""Operators on feature maps of which each rank holds a part of the height or width (spatial parallelism).

Question: what does a rank compute of its part of a picture? Input: the part, and the dim that is split over an axis.
Output: the part of what the operator of the whole picture computes. The operators exchange what they need themselves:

| operator | exchanged forward | exchanged backward |
|---|---|---|
| halo_convolution, halo_conv_transpose, halo_resize | rows next to the part: the halo | gradients of these rows |
| halo_max_pool, halo_avg_pool | as above | as above |
| split_batch_norm, split_group_norm | mean and variance of each part | two sums |
| part_mean | nothing: the result is a summand | nothing |

Read halo (rows of the neighbours), windows (convolutions and pools), resize (interpolation), norms, mean.

>>> part = torch.ops.autopar.halo_max_pool(x, [3, 3], [2, 2], [1, 1], [1, 1], 2, [1, 0], 4, "tp")  # height over 4 ranks
"""
