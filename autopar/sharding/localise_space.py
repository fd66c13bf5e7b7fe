"""One rank's part of an operation on feature maps.

Where the height or width is split and ranks exchange something, it is an operator of `autopar.ops.space`. All others
keep their operator: a convolution by 1 × 1, the norm of a model that evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from autopar.ir.graph import Op
from autopar.ops.registry import for_each_dim, named_arguments
from autopar.sharding.bound_call import argument, dims_from_front
from autopar.sharding.local_op import LocalOp, with_argument
from autopar.sharding.rule import Halo


def with_operator(part: LocalOp, name: str, *arguments: Any) -> Op:
    """The operation as one of `autopar.ops.space`."""
    return replace(part.op, target=f"autopar.{name}.default", args=arguments, kwargs=())


def reads_halo(part: LocalOp) -> bool:
    """Whether the rank reads rows of its neighbours."""
    return part.halo != Halo(0, 0)


def splits_pixels(part: LocalOp) -> bool:
    """Whether the letter of a dim of pixels is split."""
    return part.letter.startswith("y")


def where(part: LocalOp) -> tuple[Any, ...]:
    """The last arguments of operators with a halo: dim, halo, ranks, axis."""
    (split,) = part.layouts[0].splits
    return split.dim, (part.halo.before, part.halo.after), part.ranks, split.axis


def spatial_dims(op: Op) -> int:
    """Number of dims of a convolution or pool, which its name ends with."""
    return int(op.target.split(".")[1].removesuffix("d")[-1])


# -- convolutions and pools -------------------------------------------------------------------------------------------


def local_groups(position: int, name: str) -> Callable[[LocalOp], Op]:
    """A function that replaces the number of groups by a rank's number where groups are split."""

    def localise(part: LocalOp) -> Op:
        if part.letter != "g":
            return part.op
        return with_argument(part.op, position, name, part.share(argument(part.op, position, name)))

    return localise


def local_convolution(part: LocalOp) -> Op:
    """A convolution of a part of the picture, or of some groups."""
    if not reads_halo(part):
        return local_groups(6, "groups")(part)
    given, dims = named_arguments(part.op), spatial_dims(part.op)
    stride, dilation = (for_each_dim(given[name], dims) for name in ("stride", "dilation"))
    return with_operator(
        part, "halo_convolution", given["input"], given["weight"], given["bias"], stride, paddings(part), dilation,
        given["groups"], *where(part),
    )  # fmt: skip


def paddings(part: LocalOp) -> tuple[int, ...]:
    """Padding of each dim of a convolution; that of the dim that is split is not read."""
    padding, dims = named_arguments(part.op)["padding"], spatial_dims(part.op)
    if not isinstance(padding, str):
        return for_each_dim(padding, dims)
    none = Halo(0, 0)
    return tuple(part.rule.halos.get(f"y{i}", none).before if padding == "same" else 0 for i in range(dims))


def local_transposed_convolution(part: LocalOp) -> Op:
    """A transposed convolution of a part of the picture, or of some groups."""
    if not reads_halo(part):
        return local_groups(6, "groups")(part)
    given, dims = named_arguments(part.op), spatial_dims(part.op)
    names = ("stride", "padding", "output_padding", "dilation")
    stride, padding, output_padding, dilation = (for_each_dim(given[name], dims) for name in names)
    return with_operator(
        part, "halo_conv_transpose", given["input"], given["weight"], given["bias"], stride, padding, output_padding,
        dilation, given["groups"], *where(part),
    )  # fmt: skip


def local_max_pool(part: LocalOp) -> Op:
    """Maxima of windows of a part of the picture."""
    if not reads_halo(part):
        return part.op
    given, dims = named_arguments(part.op), spatial_dims(part.op)
    kernel, padding, dilation = (for_each_dim(given[name], dims) for name in ("kernel_size", "padding", "dilation"))
    stride = for_each_dim(given["stride"] or kernel, dims)
    return with_operator(
        part, "halo_max_pool", given["self"], kernel, stride, padding, dilation, given["ceil_mode"], *where(part)
    )


def local_avg_pool(part: LocalOp) -> Op:
    """Means of windows of a part of the picture."""
    if not reads_halo(part):
        return part.op
    given, dims = named_arguments(part.op), spatial_dims(part.op)
    kernel, padding = (for_each_dim(given[name], dims) for name in ("kernel_size", "padding"))
    stride = for_each_dim(given["stride"] or kernel, dims)
    return with_operator(
        part, "halo_avg_pool", given["self"], kernel, stride, padding, given["ceil_mode"],
        given.get("divisor_override"), *where(part),
    )  # fmt: skip


def local_adaptive_avg_pool(part: LocalOp) -> Op:
    """Means of equal windows of a part of the picture, or a summand of means of the whole picture."""
    dims = spatial_dims(part.op)
    if part.layouts[0].partial:
        return summand_of_mean(part, range(-dims, 0), True)
    return with_argument(part.op, 1, "output_size", part.shapes[0][-dims:])


# -- resizing ---------------------------------------------------------------------------------------------------------


def local_nearest(part: LocalOp) -> Op:
    """Nearest neighbours in a part of the picture: to the size of the part."""
    if not splits_pixels(part):
        return part.op
    return replace(part.op, args=(part.op.args[0], part.shapes[0][2:], None), kwargs=())


def local_interpolation(cubic: bool) -> Callable[[LocalOp], Op]:
    """A function for linear or cubic interpolation of a part of the picture."""

    def localise(part: LocalOp) -> Op:
        if not reads_halo(part):
            return part.op
        dim, *how = where(part)
        sizes, units = part.rule.sizes, part.factor.unit or part.rule.sizes[part.letter] // part.ranks
        ratio = sizes[f"a{dim - 2}"], sizes[f"b{dim - 2}"]
        whole = (sizes[part.letter] * rows for rows in ratio)
        shared_out = (units * rows for rows in ratio)
        return with_operator(
            part, "halo_resize", part.op.args[0], part.shapes[0][2:], argument(part.op, 2, "align_corners"), cubic,
            *whole, *shared_out, dim, *how,
        )  # fmt: skip

    return localise


# -- norms and means --------------------------------------------------------------------------------------------------


def local_batch_norm(part: LocalOp) -> Op:
    """A batch norm whose moments are those of all parts; in evaluation they are given."""
    given = named_arguments(part.op)
    if not splits_pixels(part) or not given["training"]:
        return part.op
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    return with_operator(part, "split_batch_norm", *(given[name] for name in names), *over(part))


def local_group_norm(part: LocalOp) -> Op:
    """A group norm of some groups, or one whose moments are those of all parts."""
    if not splits_pixels(part):
        return local_groups(1, "num_groups")(part)
    given = named_arguments(part.op)
    names = ("input", "num_groups", "weight", "bias", "eps")
    return with_operator(part, "split_group_norm", *(given[name] for name in names), *over(part))


def local_instance_norm(part: LocalOp) -> Op:
    """An instance norm whose moments are those of all parts: a group norm with a group for each channel."""
    if not splits_pixels(part):
        return part.op
    given, channels = named_arguments(part.op), part.shapes[0][1]
    return with_operator(
        part, "split_group_norm", given["input"], channels, given["weight"], given["bias"], given["eps"], *over(part)
    )


def over(part: LocalOp) -> tuple[int, str]:
    """The ranks that share moments, and their axis."""
    (split,) = part.layouts[0].splits
    return part.ranks, split.axis


def local_mean(part: LocalOp) -> Op:
    """A mean over other dims than the one that is split, or a rank's summand of a mean."""
    if not part.layouts[0].partial:
        return part.op
    return summand_of_mean(part, named_arguments(part.op)["dim"], named_arguments(part.op)["keepdim"])


def summand_of_mean(part: LocalOp, dims: Sequence[int] | None, keepdim: bool) -> Op:
    """A rank's summand of a mean over dims of which one is split."""
    shape = tuple(prod(part.rule.sizes[x] for x in letters) for letters in part.rule.operands[0])
    over = sorted(dims_from_front(None if dims is None else tuple(dims), len(shape)))
    count, dtype = prod(shape[dim] for dim in over), dict(part.op.kwargs).get("dtype")
    return with_operator(part, "part_mean", part.op.args[0], tuple(over), keepdim, count, dtype)


LOCALISED: Mapping[str, Callable[[LocalOp], Op]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), local_convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), local_transposed_convolution),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), local_max_pool),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), local_avg_pool),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"), local_adaptive_avg_pool),
    **dict.fromkeys(
        (f"{name}{dims}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3)),
        local_nearest,
    ),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), local_interpolation(False)),
    "upsample_bicubic2d": local_interpolation(True),
    "batch_norm": local_batch_norm,
    "group_norm": local_group_norm,
    "instance_norm": local_instance_norm,
    "mean.dim": local_mean,
}
