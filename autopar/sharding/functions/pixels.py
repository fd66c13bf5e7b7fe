"""Rules of operations on feature maps [N, C, …] whose height and width can be split.

These are convolutions, pools, resizing and norms.

A dim is split where parts of the input belong to parts of the output: a part of ``y · stride`` rows makes ``y`` rows.
Windows that reach over the end of a part give its letter a halo. The local operations are in
`autopar.sharding.localise_space`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from autopar.sharding.bound_call import BoundCall, RuleFunction, dim_letters, make_rule
from autopar.sharding.rule import Dims, Halo, Rule

# -- windows over a dim -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Windows over one dim: each spans ``span`` elements, the first begins ``before`` elements before the dim."""

    span: int
    stride: int
    before: int

    def halo(self) -> Halo:
        """Elements before and after ``y · stride`` ones that their ``y`` windows read."""
        return Halo(self.before, max(0, self.span - self.stride - self.before))


def per_dim(value: Any, dim: int) -> Any:
    """The value of an argument for one dim; the argument has a value per dim, or one for all."""
    return value[dim if len(value) > 1 else 0] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class PixelLetters:
    """Letters of the spatial dims of an operation's input and output, with arguments for `make_rule`."""

    read: Dims
    made: Dims
    sizes: Mapping[str, int]
    whole: Sequence[str]
    halos: Mapping[str, Halo]


def window_letters(windows: Sequence[Window | None], before: Sequence[int], after: Sequence[int]) -> PixelLetters:
    """Letters of dims under windows: ``(y s!)`` becomes ``y``. Dims whose sizes do not divide so are whole.

    Args:
        windows: None for dims that are whole.
        before, after: sizes of the dims.
    """
    read, made, sizes, halos = [], [], dict[str, int](), dict[str, Halo]()
    for i, (window, size, count) in enumerate(zip(windows, before, after, strict=True)):
        if window is None or size != count * window.stride:
            read.append((f"v{i}",))
            made.append(())
            continue
        read.append((f"y{i}", f"s{i}"))
        made.append((f"y{i}",))
        sizes |= {f"y{i}": count, f"s{i}": window.stride}
        if window.halo() != Halo(0, 0):
            halos[f"y{i}"] = window.halo()
    whole = [f"{letter}{i}" for i in range(len(windows)) for letter in "sv"]
    return PixelLetters(tuple(read), tuple(made), sizes, whole, halos)


# -- convolutions -----------------------------------------------------------------------------------------------------


def convolution(call: BoundCall) -> Rule | None:
    """conv1d to conv3d: channels of a group in, out, and groups; height and width."""
    kernel, groups = call.operands[1][2:], call.argument(6, "groups", 1)
    lead = samples(call, len(kernel))
    at = len(lead) + 1
    windows = [convolution_window(call, i, size) for i, size in enumerate(kernel)]
    windows = windows if all(windows) else [None] * len(windows)
    pixels = window_letters(windows, call.operands[0][at:], call.outputs[0][at:])
    sizes = {**pixels.sizes, **channel_sizes(groups, call.operands[1][1], call.operands[1][0] // groups)}
    into, out = channels("i", groups), channels("o", groups)
    operands: list[Dims] = [(*lead, into, *pixels.read), (out, ("i",), *((),) * len(kernel)), (out,)]
    return make_rule(
        call, operands[: len(call.operands)], [(*lead, out, *pixels.made)], sizes=sizes, summed="i",
        whole=pixels.whole, added=bias_operands(call), halos=pixels.halos,
    )  # fmt: skip


def convolution_window(call: BoundCall, dim: int, kernel: int) -> Window | None:
    """The window of a convolution over one dim; None where one side of it is padded more than the other."""
    span = per_dim(call.argument(5, "dilation", 1), dim) * (kernel - 1) + 1
    padding = per_dim(call.argument(4, "padding", 0), dim)
    if padding == "same":
        padding = (span - 1) // 2 if span % 2 else None
    return (
        None
        if padding is None
        else Window(span, per_dim(call.argument(3, "stride", 1), dim), 0 if padding == "valid" else padding)
    )


def transposed_convolution(call: BoundCall) -> Rule | None:
    """conv_transpose1d to 3d, whose weight has its input channels first: ``y`` becomes ``(y s!)``."""
    kernel, groups = call.operands[1][2:], call.argument(6, "groups", 1)
    lead = samples(call, len(kernel))
    into, out = channels("i", groups), channels("o", groups)
    sizes = channel_sizes(groups, call.operands[1][0] // groups, call.operands[1][1])
    read, made, halos = [], [], dict[str, Halo]()
    for i, size in enumerate(kernel):
        at, stride = len(lead) + 1 + i, per_dim(call.argument(3, "stride", 1), i)
        reach = per_dim(call.argument(7, "dilation", 1), i) * (size - 1)
        padding = per_dim(call.argument(4, "padding", 0), i)
        if call.outputs[0][at] != stride * call.operands[0][at] or padding > reach:
            read.append((f"v{i}",))
            made.append(())
            continue
        read.append((f"y{i}",))
        made.append((f"y{i}", f"s{i}"))
        sizes |= {f"y{i}": call.operands[0][at], f"s{i}": stride}
        # As many on either side, so that the same padding more on either side cuts off what they make.
        around = max((reach - padding) // stride, (padding - 1) // stride + 1)
        if around:
            halos[f"y{i}"] = Halo(around, around)
    operands: list[Dims] = [(*lead, into, *read), (into, ("o",), *((),) * len(kernel)), (out,)]
    whole = [f"{letter}{i}" for i in range(len(kernel)) for letter in "sv"]
    return make_rule(
        call, operands[: len(call.operands)], [(*lead, out, *made)], sizes=sizes, summed="i", whole=whole,
        added=bias_operands(call), halos=halos,
    )  # fmt: skip


def samples(call: BoundCall, spatial: int) -> Dims:
    """Letter of the samples, of which an operand without a batch has none."""
    return (("n",),) if len(call.operands[0]) > spatial + 1 else ()


def channels(letter: str, groups: int) -> tuple[str, ...]:
    """The letters of a dim of channels."""
    return ("g", letter) if groups > 1 else (letter,)


def channel_sizes(groups: int, into: int, out: int) -> dict[str, int]:
    """Sizes of the channel letters: groups, and channels of one group."""
    return {"g": groups, "i": into, "o": out}


def bias_operands(call: BoundCall) -> list[int]:
    """Number of the bias operand, if there is one."""
    return [2] if len(call.operands) > 2 else []


# -- pools and resizing -----------------------------------------------------------------------------------------------


def max_pool(dims: int) -> RuleFunction:
    """A rule for maxima of windows over the last dims."""

    def window(call: BoundCall, i: int) -> Window | None:
        kernel = per_dim(call.argument(1, "kernel_size"), i)
        stride = per_dim(call.argument(2, "stride", ()) or kernel, i)
        span = per_dim(call.argument(4, "dilation", 1), i) * (kernel - 1) + 1
        return Window(span, stride, per_dim(call.argument(3, "padding", 0), i))

    return pooled(dims, window)


def avg_pool(dims: int) -> RuleFunction:
    """A rule for means of windows over the last dims; dims are whole where windows over the border count less."""

    def window(call: BoundCall, i: int) -> Window | None:
        kernel = per_dim(call.argument(1, "kernel_size"), i)
        stride = per_dim(call.argument(2, "stride", ()) or kernel, i)
        found = Window(kernel, stride, per_dim(call.argument(3, "padding", 0), i))
        counts_all = call.argument(5, "count_include_pad", True) and not call.argument(4, "ceil_mode", False)
        counted = counts_all or call.argument(6, "divisor_override") is not None
        return found if counted or found.halo() == Halo(0, 0) else None

    return pooled(dims, window)


def pooled(dims: int, window: Callable[[BoundCall, int], Window | None]) -> RuleFunction:
    """A rule for windows over the last ``dims`` dims.

    Args:
        window: that of a call over one of these dims; None for dims that are whole.
    """

    def rule(call: BoundCall) -> Rule | None:
        shape, made = call.operands[0], call.outputs[0]
        lead = dim_letters(shape[:-dims])
        pixels = window_letters([window(call, i) for i in range(dims)], shape[-dims:], made[-dims:])
        return make_rule(
            call, [(*lead, *pixels.read)], [(*lead, *pixels.made)], sizes=pixels.sizes, whole=pixels.whole,
            halos=pixels.halos,
        )  # fmt: skip

    return rule


def adaptive_avg_pool(dims: int) -> RuleFunction:
    """A rule for means over equal windows, or over whole dims: these are sums of the parts' means."""

    def rule(call: BoundCall) -> Rule | None:
        shape, made = call.operands[0], call.outputs[0]
        lead = dim_letters(shape[:-dims])
        if set(made[-dims:]) == {1}:
            pixels = dim_letters(shape[-dims:], "y")
            return make_rule(call, [(*lead, *pixels)], [(*lead, *((),) * dims)], summed=[y for (y,) in pixels])
        windows = [Window(size // count, size // count, 0) for size, count in zip(shape[-dims:], made[-dims:])]
        letters = window_letters(windows, shape[-dims:], made[-dims:])
        return make_rule(
            call, [(*lead, *letters.read)], [(*lead, *letters.made)], sizes=letters.sizes, whole=letters.whole
        )

    return rule


def resized_nearest(dims: int) -> RuleFunction:
    """A rule for nearest neighbours: each element becomes several, or one of several stays."""
    return resized(dims, 2, lambda read, made: Halo(0, 0) if 1 in (read, made) else None)


def resized_linearly(dims: int) -> RuleFunction:
    """A rule for linear interpolation between neighbours."""
    return resized(dims, 3, lambda read, made: Halo(1, 1))


def resized_cubically(dims: int) -> RuleFunction:
    """A rule for cubic interpolation between two neighbours on either side."""
    return resized(dims, 3, lambda read, made: Halo(2, 2))


def resized(dims: int, scales: int, halo: Callable[[int, int], Halo | None]) -> RuleFunction:
    """A rule for interpolation of the last ``dims`` dims: parts of ``y · a`` rows become parts of ``y · b``.

    Args:
        scales: position of the argument ``scale_factors``.
        halo: that of a part, from the numbers of rows that become one another; None for dims that are whole.
    """

    def rule(call: BoundCall) -> Rule | None:
        shape, made = call.operands[0], call.outputs[0]
        factors = call.argument(scales, "scale_factors")
        exact = factors is None or all(
            size * factor == wanted for size, factor, wanted in zip(shape[-dims:], factors, made[-dims:])
        )
        lead, read, after = dim_letters(shape[:-dims]), [], []
        sizes, halos = dict[str, int](), dict[str, Halo]()
        for i, (size, wanted) in enumerate(zip(shape[-dims:], made[-dims:])):
            shared = gcd(size, wanted)
            reach = halo(size // shared, wanted // shared) if exact else None
            if reach is None:
                read.append((f"v{i}",))
                after.append(())
                continue
            read.append((f"y{i}", f"a{i}"))
            after.append((f"y{i}", f"b{i}"))
            sizes |= {f"y{i}": shared, f"a{i}": size // shared, f"b{i}": wanted // shared}
            if reach != Halo(0, 0):
                halos[f"y{i}"] = reach
        whole = [f"{letter}{i}" for i in range(dims) for letter in "abv"]
        return make_rule(call, [(*lead, *read)], [(*lead, *after)], sizes=sizes, whole=whole, halos=halos)

    return rule


# -- norms ------------------------------------------------------------------------------------------------------------


def batch_norm(call: BoundCall) -> Rule | None:
    """Channels are independent, and pixels where ranks exchange moments; samples are data parallelism's to split."""
    dims = (("n",), ("c",), *dim_letters(call.operands[0][2:], "y"))
    vectors: list[Dims] = [(("c",),)] * (len(call.operands) - 1)
    return make_rule(call, [dims, *vectors], [dims], whole="n")


def instance_norm(call: BoundCall) -> Rule | None:
    """As `batch_norm`; pixels are whole where running statistics are kept, which are means over samples."""
    dims = (("n",), ("c",), *dim_letters(call.operands[0][2:], "y"))
    vectors: list[Dims] = [(("c",),)] * (len(call.operands) - 1)
    keeps = call.argument(3, "running_mean") is not None
    return make_rule(call, [dims, *vectors], [dims], whole=["n", *(y for (y,) in dims[2:] if keeps)])


def group_norm(call: BoundCall) -> Rule | None:
    """Samples and groups of channels are independent, and pixels where ranks exchange moments."""
    shape, groups = call.operands[0], call.argument(1, "num_groups")
    channel: Dims = (("g", "c"),)
    dims: Dims = (("n",), *channel, *dim_letters(shape[2:], "y"))
    sizes = {"g": groups, "c": shape[1] // groups}
    vectors = [channel] * (len(call.operands) - 1)
    return make_rule(call, [dims, *vectors], [dims], sizes=sizes, whole="c")
