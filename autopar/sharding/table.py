"""The rule of every operation that can be split: one line each.

A text names the letters of each operand and output; a function makes them from the shapes. Keys are ATen names, with
their overload where overloads differ. ``replicated`` is for operations that are known not to split: an operation
without an entry is replicated too, but with a warning. In operations with weight matrices, the samples of a microbatch
are not split by tensor parallelism, because that is data parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.sharding.bound_call import RuleFunction
from autopar.sharding.functions import collectives, pixels, products, shapes, views

POOL_2D = "... h! w! -> ... y! x!"

PER_ELEMENT = (
    "__and__ __or__ __xor__ __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift "  # a & b is __and__
    "_to_copy abs acos add addcdiv addcmul alias angle asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor "
    "broadcast_to ceil celu clamp clamp_max clamp_min clone complex conj contiguous copy cos cosh deg2rad detach "
    "digamma div elu empty_like eq erf erfc erfinv exp exp2 expand expand_as expm1 fill floor floor_divide fmax fmin "
    "fmod frac full_like ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan le "
    "leaky_relu lerp lgamma lift_fresh_copy log log10 log1p log2 log_sigmoid logaddexp logical_and logical_not "
    "logical_or logical_xor logit lt masked_fill maximum minimum mish mul nan_to_num ne neg ones_like polar pow "
    "rad2deg reciprocal relu relu6 remainder resolve_conj resolve_neg round rsqrt rsub selu sgn sigmoid sign silu sin "
    "sinc sinh softplus softshrink sqrt square sub tan tanh threshold to.device to.dtype to.dtype_layout true_divide "
    "trunc where.Scalar where.ScalarOther where.ScalarSelf where.self xlogy zeros_like"
)
RESHAPES = "_unsafe_view flatten.using_ints reshape reshape_as squeeze unflatten.int unsqueeze view.default view_as"
# Stateful random operations; `autopar.trace.passes.random_ops` rewrites most of them before rules are looked up.
DRAWN = (
    "alpha_dropout bernoulli.default bernoulli.p exponential feature_alpha_dropout feature_dropout "
    "normal_functional rand_like randint_like randn_like rrelu uniform"
)
NEVER_SPLIT = (
    "arange empty eye full gru linspace logspace lstm max.default mean.default meshgrid min.default normal.float_float "
    "ones rand randint randn randperm rnn_relu rnn_tanh scalar_tensor tril_indices triu_indices zeros"
)

RULES: Mapping[str, str | RuleFunction] = {
    # products: a letter of one or both sides that no output has is summed
    "linear": "... k, n k, +n -> ... n",
    "mm": "n k, k m -> n m",
    "bmm": "b n k, b k m -> b n m",
    "mv": "n k, k -> n",
    "dot": "k, k ->",
    "vdot": "k, k ->",
    "outer": "n, m -> n m",
    "matmul": products.matmul,
    "addmm": products.add_matmul,
    "baddbmm": products.add_matmul,
    "einsum": products.einsum,
    "bilinear": "... i!, ... j!, n i! j!, n -> ... n",
    "cdist": "... n k!, ... m k! -> ... n m",
    "conv1d": pixels.convolution,
    "conv2d": pixels.convolution,
    "conv3d": pixels.convolution,
    "conv_transpose1d": pixels.transposed_convolution,
    "conv_transpose2d": pixels.transposed_convolution,
    "conv_transpose3d": pixels.transposed_convolution,
    "scaled_dot_product_attention": products.attention,
    "embedding": products.embedding,
    # normalisations
    "layer_norm": products.layer_norm,
    "rms_norm": products.layer_norm,
    "group_norm": pixels.group_norm,
    "batch_norm": pixels.batch_norm,
    "instance_norm": pixels.instance_norm,
    "softmax.int": views.along(1, "dim"),
    "_safe_softmax": views.along(1, "dim"),
    "log_softmax.int": views.along(1, "dim"),
    # pixels
    "adaptive_avg_pool1d": pixels.adaptive_avg_pool(1),
    "adaptive_avg_pool2d": pixels.adaptive_avg_pool(2),
    "adaptive_avg_pool3d": pixels.adaptive_avg_pool(3),
    "adaptive_max_pool2d": "... h! w! -> ... y! x!, ... y! x!",
    "avg_pool1d": pixels.avg_pool(1),
    "avg_pool2d": pixels.avg_pool(2),
    "avg_pool3d": pixels.avg_pool(3),
    "max_pool1d": pixels.max_pool(1),
    "max_pool2d": pixels.max_pool(2),
    "max_pool3d": pixels.max_pool(3),
    "max_pool2d_with_indices": "... h! w! -> ... y! x!, ... y! x!",
    "max_unpool2d": "... h! w!, ... h! w! -> ... y! x!",
    "upsample_linear1d": pixels.resized_linearly(1),
    "upsample_nearest1d": pixels.resized_nearest(1),
    "upsample_nearest2d": pixels.resized_nearest(2),
    "upsample_nearest3d": pixels.resized_nearest(3),
    "upsample_bilinear2d": pixels.resized_linearly(2),
    "upsample_bicubic2d": pixels.resized_cubically(2),
    "upsample_trilinear3d": pixels.resized_linearly(3),
    "_upsample_nearest_exact1d": pixels.resized_nearest(1),
    "_upsample_nearest_exact2d": pixels.resized_nearest(2),
    "_upsample_nearest_exact3d": pixels.resized_nearest(3),
    "_upsample_bicubic2d_aa": POOL_2D,
    "_upsample_bilinear2d_aa": POOL_2D,
    "grid_sampler": "n c h! w!, n y! x! t! -> n c y! x!",
    "col2im": "n m! p! -> n c! h! w!",
    "im2col": "n c! h! w! -> n m! p!",
    "channel_shuffle": views.channels_shuffled,
    "pixel_shuffle": views.shuffled,
    "pixel_unshuffle": views.shuffled,
    "pad": views.padded,
    "constant_pad_nd": views.padded,
    "prelu": shapes.prelu,
    # dims in another order
    "permute": shapes.reordered(shapes.permute_order),
    "transpose.int": shapes.reordered(shapes.transpose_order),
    "swapaxes": shapes.reordered(shapes.transpose_order),
    "swapdims": shapes.reordered(shapes.transpose_order),
    "t": shapes.reordered(shapes.transpose_order),
    "mT": shapes.reordered(shapes.transpose_order),
    "mH": shapes.reordered(shapes.transpose_order),
    "matrix_H": shapes.reordered(shapes.transpose_order),
    "numpy_T": shapes.reordered(shapes.reversed_order),
    "movedim": shapes.reordered(shapes.movedim_order),
    "one_hot": "... -> ... c!",
    "view_as_real": "... -> ... c!",
    "view_as_complex": "... c! -> ...",
    # parts of dims
    "slice.Tensor": views.resized,
    "narrow": views.resized,
    "select.int": views.selected,
    "unbind.int": views.selected,
    "split.Tensor": views.split(2),
    "split.sizes": views.split(2),
    "split_with_sizes": views.split(2),
    "chunk": views.split(2),
    "glu": views.split(1, -1),
    "tensor_split.indices": views.cut(2, 0),
    "tensor_split.sections": views.cut(2, 0),
    "hsplit": views.cut(2, 1),
    "topk": views.cut(2, -1),
    "cat": views.joined,
    "concat": views.joined,
    "stack": views.stacked,
    "repeat": views.repeated,
    "tile": views.repeated,
    "unfold": views.unfolded,
    "repeat_interleave.self_int": views.repeated_each,
    "index.Tensor": views.indexed,
    "index_select": views.index_selected,
    "gather": views.gathered(1),
    "take_along_dim": views.gathered(2),
    # along dims
    "roll": views.along(2, "dims"),
    "flip": views.along(1, "dims"),
    "argsort": views.along(1, "dim", -1),
    "sort": views.along(1, "dim", -1),
    "cumsum": views.along(1, "dim"),
    "cumprod": views.along(1, "dim"),
    "cummax": views.along(1, "dim"),
    "cummin": views.along(1, "dim"),
    "logcumsumexp": views.along(1, "dim"),
    "tril": "... r! c! -> ... r! c!",
    "triu": "... r! c! -> ... r! c!",
    # fewer dims
    "sum.default": views.reduced(1, summed=True),
    "sum.dim_IntList": views.reduced(1, summed=True),
    "mean.dim": views.reduced(1, summed=True),
    "all.dim": views.reduced(1),
    "any.dim": views.reduced(1),
    "amax": views.reduced(1),
    "amin": views.reduced(1),
    "max.dim": views.reduced(1),
    "max.other": shapes.elementwise,
    "min.dim": views.reduced(1),
    "min.other": shapes.elementwise,
    "argmax": views.reduced(1),
    "argmin": views.reduced(1),
    "logsumexp": views.reduced(1),
    "median.dim": views.reduced(1),
    "quantile.scalar": views.reduced(2),
    "linalg_vector_norm": views.reduced(2),
    "norm.ScalarOpt_dim": views.reduced(2),
    "prod.dim_int": views.reduced(1),
    "std.dim": views.reduced(1),
    "std.correction": views.reduced(1),
    "var.dim": views.reduced(1),
    "var.correction": views.reduced(1),
    "var_mean.correction": views.reduced(1),
    # operands of which only the dtype is read, and random operations
    "to.other": shapes.like_second,
    "type_as": shapes.like_second,
    "new_empty": shapes.new_tensor,
    "new_full": shapes.new_tensor,
    "new_ones": shapes.new_tensor,
    "new_zeros": shapes.new_tensor,
    "dropout": shapes.dropout,
    "autopar.uniform": shapes.counter_random,
    # collectives of the axes outside
    "autopar.all_reduce": shapes.elementwise,
    "autopar.sum_gradient": shapes.elementwise,
    "autopar.share_gradient": shapes.elementwise,
    "autopar.first_rank": shapes.elementwise,
    "autopar.shard": collectives.resharded(3, split=1),
    "autopar.reduce_scatter": collectives.resharded(3, split=1),
    "autopar.all_gather": collectives.resharded(3, gathered=1),
    "autopar.all_to_all": collectives.resharded(5, gathered=1, split=3),
    **dict.fromkeys(DRAWN.split(), shapes.random),
    **dict.fromkeys(PER_ELEMENT.split(), shapes.elementwise),
    **dict.fromkeys(RESHAPES.split(), shapes.reshape),
    **dict.fromkeys(NEVER_SPLIT.split(), shapes.replicated),
}

# Operations that update weights that they read; each rank updates its part.
UPDATING = ("batch_norm", "instance_norm")
