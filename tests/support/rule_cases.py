"""One or more small calls of every operation that has a sharding rule; sizes divide by 4 where they can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ops.counter_rng import counter_rows


@dataclass(frozen=True)
class Case:
    """A call of an ATen operation; tensors that require a gradient are compared with theirs."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


def case(target: str, *args: Any, **kwargs: Any) -> Case:
    return Case(f"aten.{target}", args, tuple(kwargs.items()))


def x(*shape: int, low: float = 0.1, high: float = 0.9) -> Tensor:
    """Random float64 numbers in a range on which every elementwise function is defined."""
    return torch.empty(shape, dtype=torch.float64).uniform_(low, high).requires_grad_()


def fixed(*shape: int) -> Tensor:
    """Tensor without gradient, as a buffer."""
    return x(*shape).detach()


def n(high: int, *shape: int) -> Tensor:
    """Random integers below ``high``."""
    return torch.randint(high, shape)


def b(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.5


def z(*shape: int) -> Tensor:
    """Random complex numbers."""
    return torch.view_as_complex(torch.rand(*shape, 2, dtype=torch.float64)).requires_grad_()


ONE_OPERAND = """
    abs acos alias angle asin atan celu ceil clone contiguous cos cosh deg2rad detach digamma elu empty_like erf
    erfc erfinv exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan
    leaky_relu lgamma lift_fresh_copy log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num neg
    ones_like rad2deg reciprocal relu relu6 resolve_conj resolve_neg round rsqrt selu sgn sigmoid sign silu sin
    sinc sinh softplus softshrink sqrt square tan tanh trunc zeros_like _to_copy
""".split()  # noqa: SIM905
TWO_OPERANDS = """
    add.Tensor atan2.default complex.default div.Tensor eq.Tensor floor_divide.default fmax.default fmin.default
    fmod.Tensor ge.Tensor gt.Tensor heaviside.default hypot.default le.Tensor logaddexp.default logical_and.default
    logical_or.default logical_xor.default lt.Tensor max.other maximum.default min.other minimum.default mul.Tensor
    ne.Tensor polar.default pow.Tensor_Tensor remainder.Tensor rsub.Tensor sub.Tensor true_divide.Tensor xlogy.Tensor
""".split()  # noqa: SIM905


def per_element() -> Iterator[Case]:
    yield from (case(f"{name}.default", x(4, 8)) for name in ONE_OPERAND)
    for name in TWO_OPERANDS:
        operands = (fixed, fixed) if name in ("heaviside.default", "floor_divide.default") else (x, x)
        yield case(name, operands[0](2, 4, 8), operands[1](4, 8))
    yield case("add.Tensor", x(4, 1, 8), x(2, 1, 4, 1), alpha=0.5)
    yield case("add.Scalar", x(4, 8), 2.0)
    yield case("mul.Scalar", x(4, 8), 2.0)
    yield case("conj.default", z(4, 8))
    for name in (
        "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "__and__", "__or__",
        "__xor__", "__lshift__", "__rshift__",
    ):  # fmt: skip
        yield case(f"{name}.Tensor", n(9, 4, 8), n(9, 8))
    yield case("bitwise_not.default", n(9, 4, 8))
    yield case("addcdiv.default", x(4, 8), x(8), x(4, 1), value=0.5)
    yield case("addcmul.default", x(8), x(4, 8), x(4, 1))
    yield case("broadcast_to.default", x(4, 1, 8), (2, 4, 4, 8))
    yield case("expand.default", x(1, 4, 8), (4, -1, 8))
    yield case("expand.default", x(4, 1), (2, 4, 8))
    yield case("expand_as.default", x(4, 1), x(2, 4, 8))
    yield case("clamp.default", x(4, 8), 0.3, 0.6)
    yield case("clamp.Tensor", x(4, 8), x(8), x(4, 1, low=1.0, high=2.0))
    yield case("clamp_max.default", x(4, 8), 0.5)
    yield case("clamp_min.default", x(4, 8), 0.5)
    yield case("copy.default", fixed(4, 8), fixed(8))
    yield case("fill.Scalar", x(4, 8), 3.0)
    yield case("full_like.default", x(4, 8), 3.0)
    yield case("lerp.Scalar", x(4, 8), x(8), 0.5)
    yield case("lerp.Tensor", x(4, 8), x(8), x(4, 1))
    yield case("masked_fill.Scalar", x(4, 8), b(4, 1), 2.0)
    yield case("masked_fill.Tensor", x(4, 8), b(2, 4, 8), x())
    yield case("threshold.default", x(4, 8), 0.5, 0.1)
    yield case("to.device", x(4, 8), torch.device("cpu"), torch.float32)
    yield case("to.dtype", x(4, 8), torch.float32)
    yield case("to.dtype_layout", x(4, 8), dtype=torch.float32)
    yield case("where.self", b(4, 1), x(4, 8), x(2, 1, 8))
    yield case("where.Scalar", b(4, 8), 1.0, 2.0)
    yield case("where.ScalarOther", b(4, 8), x(8), 2.0)
    yield case("where.ScalarSelf", b(4, 8), 2.0, x(8))
    same = x(4, 8)
    yield case("mul.Tensor", same, same)
    yield case("to.other", x(4, 8), n(9, 4, 8))
    yield case("to.other", x(4, 8), fixed(8, 2).float())
    yield case("type_as.default", x(4, 8), fixed(4, 8).float())
    yield case("type_as.default", x(4, 8), fixed(8).float())


def products() -> Iterator[Case]:
    yield case("linear.default", x(4, 8), x(12, 8), x(12))
    yield case("linear.default", x(2, 4, 8), x(12, 8))
    yield case("linear.default", x(8), x(12, 8), x(12))
    yield case("mm.default", x(4, 8), x(8, 12))
    yield case("bmm.default", x(4, 4, 8), x(4, 8, 12))
    yield case("mv.default", x(4, 8), x(8))
    yield case("dot.default", x(8), x(8))
    yield case("vdot.default", x(8), x(8))
    yield case("outer.default", x(4), x(8))
    yield case("bilinear.default", x(4, 8), x(4, 3), x(4, 8, 3), x(4))
    yield case("cdist.default", x(2, 4, 3), x(2, 8, 3))
    for left, right in (
        ((4, 8), (8, 12)), ((2, 4, 8), (8, 12)), ((4, 8), (4, 8, 4)), ((4, 1, 4, 8), (2, 8, 4)), ((8,), (4, 8, 4)),
        ((4, 8), (8,)), ((8,), (8,)),
    ):  # fmt: skip
        yield case("matmul.default", x(*left), x(*right))
    square = x(4, 4, 4)
    yield case("matmul.default", square, square)
    for shape in ((4, 12), (12,), (1, 12), (4, 1), (1,)):
        yield case("addmm.default", x(*shape), x(4, 8), x(8, 12), beta=0.5, alpha=2.0)
    for shape in ((4, 4, 12), (12,), (4, 1, 1)):
        yield case("baddbmm.default", x(*shape), x(4, 4, 8), x(4, 8, 12), beta=0.5)
    yield case("einsum.default", "bhqd,bhkd->bhqk", (x(2, 4, 4, 8), x(2, 4, 8, 8)))
    yield case("einsum.default", "bk, bk, bn -> bn", (x(4, 8), x(4, 8), x(4, 4)))
    yield case("einsum.default", "bii,ij->bj", (x(2, 4, 4), x(4, 8)))
    yield case("einsum.default", "abc->cab", (x(2, 4, 8),))
    yield case("einsum.default", "...rk,rkc->...rc", (x(2, 4, 8), x(4, 8, 2)))
    yield case("einsum.default", "b...k,...kc->b...c", (x(2, 4, 8), x(1, 8, 4)))
    yield case("einsum.default", "bk,kc", (x(2, 4), x(4, 8)))
    yield case("einsum.default", "c...b", (x(2, 4, 8),))
    yield case("embedding.default", x(8, 4), n(8, 4, 4))
    yield case("embedding.default", x(8, 4), n(8, 4, 4), 3, True)


def convolutions() -> Iterator[Case]:
    image = (2, 8, 8, 8)
    yield case("conv2d.default", x(*image), x(4, 8, 3, 3), x(4), (1, 1), (1, 1))
    yield case("conv2d.default", x(*image), x(4, 8, 1, 1), None, (2, 2))
    yield case("conv2d.default", x(4, 8, 4, 4), x(4, 8, 1, 1), x(4))
    yield case("conv2d.default", x(2, 4, 8, 8), x(8, 4, 2, 2), x(8), (2, 2))
    yield case("conv2d.default", x(2, 4, 9, 8), x(8, 4, 2, 2), x(8), (2, 2))
    yield case("conv2d.default", x(2, 4, 8, 8), x(8, 4, 2, 2), x(8), (2, 2), (1, 0), (1, 2))
    yield case("conv2d.default", x(*image), x(16, 2, 3, 3), x(16), (1, 1), (1, 1), (1, 1), 4)
    yield case("conv2d.default", x(2, 16, 4, 4), x(8, 8, 3, 3), x(8), (1, 1), (1, 1), (1, 1), 2)
    yield case("conv2d.default", x(*image), x(8, 1, 3, 3), x(8), (1, 1), (1, 1), (1, 1), 8)
    yield case("conv2d.default", x(*image), x(32, 1, 3, 3), None, (2, 2), (1, 1), (1, 1), 8)
    yield case("conv2d.default", x(8, 8, 8), x(4, 8, 3, 3), x(4))
    yield case("conv2d.padding", x(*image), x(4, 8, 3, 3), x(4), (1, 1), "same")
    yield case("conv2d.padding", x(*image), x(4, 4, 1, 1), x(4), (1, 1), "same", (1, 1), 2)
    yield case("conv2d.padding", x(*image), x(4, 8, 2, 2), x(4), (2, 2), "valid")
    yield case("conv2d.default", x(1, 4, 16, 16), x(4, 4, 7, 7), None, (2, 2), (3, 3))
    yield case("conv2d.default", x(2, 4, 16, 8), x(8, 1, 5, 3), x(8), (1, 2), (4, 1), (2, 1), 4)
    yield case("conv2d.default", x(2, 4, 8, 8), x(4, 4, 5, 5), x(4), (1, 1), (2, 2))
    yield case("conv2d.default", x(2, 4, 8, 8), x(4, 4, 3, 3), x(4), (1, 1), (2, 0))
    yield case("conv2d.padding", x(2, 4, 8, 8), x(4, 4, 3, 2), x(4), (1, 1), "same")
    yield case("conv1d.default", x(2, 4, 8), x(8, 4, 3), x(8), (1,), (1,))
    yield case("conv1d.default", x(2, 4, 8), x(8, 1, 3), x(8), (1,), (1,), (1,), 4)
    yield case("conv3d.default", x(2, 4, 4, 8, 8), x(4, 4, 1, 2, 3), x(4), (1, 2, 1))
    yield case("conv_transpose1d.default", x(2, 4, 8), x(4, 8, 2), x(8), (2,))
    yield case("conv_transpose2d.input", x(2, 8, 4, 4), x(8, 4, 2, 2), x(4), (2, 2))
    yield case("conv_transpose2d.input", x(2, 16, 4, 4), x(16, 4, 2, 2), x(16), (2, 2), (0, 0), (0, 0), 4)
    yield case("conv_transpose2d.input", x(2, 4, 8, 8), x(4, 4, 4, 4), x(4), (2, 2), (1, 1))
    yield case("conv_transpose2d.input", x(2, 4, 8, 8), x(4, 4, 3, 3), x(4), (2, 2), (1, 1), (1, 1))
    yield case("conv_transpose2d.input", x(2, 4, 8, 8), x(4, 2, 3, 5), x(4), (1, 1), (2, 2), (0, 0), 2, (2, 1))
    yield case("conv_transpose3d.input", x(2, 4, 2, 2, 2), x(4, 4, 2, 2, 2), None, (2, 2, 2))
    yield case("col2im.default", x(4, 16, 9), (4, 4), (2, 2), (1, 1), (0, 0), (1, 1))
    yield case("im2col.default", x(4, 4, 4, 4), (2, 2), (1, 1), (0, 0), (1, 1))


def attention() -> Iterator[Case]:
    target, qkv = "scaled_dot_product_attention.default", ((2, 4, 8, 4), (2, 4, 12, 4), (2, 4, 12, 8))
    yield case(target, *(x(*s) for s in qkv))
    yield case(target, x(4, 8, 4), x(4, 4, 4), x(4, 4, 4))
    yield case(target, x(2, 4, 8, 4), x(2, 1, 12, 4), x(2, 1, 12, 8))
    same = x(2, 4, 8, 4)
    yield case(target, same, same, same)
    for mask in ((8, 12), (4, 8, 12), (1, 4, 8, 12), (2, 1, 1, 12), (2, 1, 8, 1), (2, 4, 8, 12)):
        yield case(target, *(x(*s) for s in qkv), x(*mask))
    yield case(target, *(x(*s) for s in qkv), b(2, 1, 8, 12).logical_or(torch.eye(8, 12) > 0))
    yield case(target, x(2, 4, 8, 4), x(2, 4, 8, 4), x(2, 4, 8, 4), None, 0.0, True, scale=0.3)
    yield case(target, x(2, 16, 8, 4), x(2, 4, 8, 4), x(2, 4, 8, 4), enable_gqa=True)
    yield case(target, x(2, 8, 4, 4), x(2, 2, 8, 4), x(2, 2, 8, 4), x(8, 4, 8), 0.0, False, enable_gqa=True)
    yield case(target, x(2, 4, 4, 4), x(2, 4, 8, 4), x(2, 4, 8, 4), enable_gqa=True)


def normalisations() -> Iterator[Case]:
    yield case("layer_norm.default", x(4, 4, 8), (8,), x(8), x(8))
    yield case("layer_norm.default", x(4, 4, 8), (4, 8), x(4, 8))
    yield case("layer_norm.default", x(4, 8), (8,))
    yield case("rms_norm.default", x(4, 4, 8), (8,), x(8), 1e-5)
    yield case("rms_norm.default", x(4, 4, 8), (4, 8))
    yield case("group_norm.default", x(4, 16, 4), 4, x(16), x(16))
    yield case("group_norm.default", x(4, 16, 4, 4), 8)
    yield case("group_norm.default", x(4, 16), 1, x(16))
    for training in (True, False):
        weights = (x(8), x(8), fixed(8), fixed(8))
        yield case("batch_norm.default", x(4, 8, 4, 4), *weights, training, 0.1, 1e-5, True)
    yield case("batch_norm.default", x(1, 4, 8, 4, 4), None, x(4), None, None, True, 0.1, 1e-5, True)
    yield case("batch_norm.default", x(4, 8), x(8), x(8), None, None, True, 0.1, 1e-5, True)
    yield case("instance_norm.default", x(4, 8, 4), x(8), x(8), fixed(8), fixed(8), True, 0.1, 1e-5, True)
    yield case("instance_norm.default", x(4, 8, 4, 8), x(8), x(8), None, None, True, 0.1, 1e-5, True)
    for target in ("softmax.int", "log_softmax.int", "_safe_softmax.default"):
        yield case(target, x(4, 4, 8), -1)
        yield case(target, x(4, 4, 8), 1)


def pixels() -> Iterator[Case]:
    line, image, volume = (2, 4, 8), (2, 4, 8, 8), (2, 4, 4, 4, 4)
    yield case("adaptive_avg_pool1d.default", x(*line), (2,))
    yield case("adaptive_avg_pool2d.default", x(*image), (1, 1))
    yield case("adaptive_avg_pool2d.default", x(4, 8, 8), (2, 4))
    yield case("adaptive_avg_pool3d.default", x(*volume), (1, 2, 1))
    yield case("adaptive_max_pool2d.default", x(*image), (2, 2))
    yield case("avg_pool1d.default", x(*line), (2,))
    yield case("avg_pool2d.default", x(*image), (3, 3), (1, 1), (1, 1))
    yield case("avg_pool3d.default", x(*volume), (2, 2, 2))
    yield case("max_pool1d.default", x(*line), (2,))
    yield case("max_pool2d.default", x(*image), (3, 3), (2, 2), (1, 1))
    yield case("max_pool2d.default", x(*image), (3, 3), (2, 2), (0, 0), (1, 1), True)
    yield case("max_pool2d.default", x(*image), (3, 5), (1, 1), (1, 2))
    yield case("avg_pool2d.default", x(*image), (3, 3), (2, 2), (1, 1))
    yield case("avg_pool2d.default", x(*image), (3, 3), (1, 1), (1, 1), False, False)
    yield case("avg_pool2d.default", x(*image), (3, 3), (2, 2), (0, 1), True, True, 7)
    yield case("adaptive_avg_pool2d.default", x(*image), (4, 8))
    yield case("adaptive_avg_pool2d.default", x(*image), (3, 1))
    yield case("max_pool3d.default", x(*volume), (2, 2, 2))
    yield case("max_pool2d_with_indices.default", x(*image), (2, 2))
    yield case("max_unpool2d.default", x(*image), torch.arange(0, 256, 4).view(8, 8).expand(image), (16, 16))
    yield case("upsample_linear1d.vec", x(*line), (16,), False, None)
    yield case("upsample_nearest1d.vec", x(*line), (16,), None)
    yield case("upsample_nearest2d.vec", x(*image), None, (2.0, 2.0))
    yield case("upsample_nearest3d.vec", x(*volume), None, (2.0, 2.0, 2.0))
    for name in ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"):
        yield case(f"{name}.vec", x(*image), (12, 6), False, None)
    for name in ("upsample_bilinear2d", "upsample_bicubic2d"):
        yield case(f"{name}.vec", x(*image), (24, 16), True, None)
        yield case(f"{name}.vec", x(*image), None, False, (2.0, 4.0))
        yield case(f"{name}.vec", x(2, 4, 16, 8), (8, 10), True, None)
        yield case(f"{name}.vec", x(*image), None, False, (1.3, 2.0))
    yield case("upsample_nearest2d.vec", x(*image), (4, 16), None)
    yield case("upsample_nearest2d.vec", x(*image), (12, 8), None)
    yield case("_upsample_nearest_exact1d.vec", x(*line), (12,), None)
    yield case("_upsample_nearest_exact2d.vec", x(*image), (12, 6), None)
    yield case("_upsample_nearest_exact3d.vec", x(*volume), None, (2.0, 2.0, 2.0))
    yield case("upsample_trilinear3d.vec", x(*volume), (8, 8, 8), False, None)
    yield case("grid_sampler.default", x(4, 4, 4, 4), x(4, 2, 8, 2), 0, 0, False)
    yield case("channel_shuffle.default", x(2, 16, 4, 4), 4)
    yield case("pixel_shuffle.default", x(2, 16, 4, 4), 2)
    yield case("pixel_unshuffle.default", x(2, 4, 8, 8), 2)
    yield case("pad.default", x(*image), (0, 0, 1, 2))
    yield case("pad.default", x(*image), (0, 0, 0, 0, 1, -1))
    yield case("pad.default", x(*image), (1, 1, 0, 0), "reflect")
    yield case("constant_pad_nd.default", x(*line), (2, 2), 1.5)
    yield case("prelu.default", x(2, 8, 4, low=-1.0, high=1.0), x(8))
    yield case("prelu.default", x(2, 8, 4, low=-1.0, high=1.0), x(1))


def reshapes() -> Iterator[Case]:
    for target in ("reshape.default", "view.default", "_unsafe_view.default"):
        yield case(target, x(2, 4, 24), (2, 4, 3, 4, 2))
    for before, after in (
        ((2, 4, 3, 4, 2), (2, 4, 24)),
        ((4, 8), (-1,)),
        ((4, 6), (6, 4)),
        ((8, 6, 4), (4, 12, -1)),
        ((1, 4, 8), (4, 1, 2, 4)),
        ((2, 8, 8, 4), (2, 2, 4, 2, 4, 4)),
        ((2, 2, 2, 4, 4, 4), (8, 16, 4)),
        ((16, 16, 4), (4, 2, 2, 4, 4, 4)),
        ((16,), (16, 1)),
        ((1,), ()),
    ):
        yield case("reshape.default", x(*before), after)
    yield case("reshape_as.default", x(4, 8), x(32))
    yield case("view_as.default", x(4, 8), x(4, 2, 4))
    yield case("flatten.using_ints", x(2, 4, 8, 4), 1, 2)
    yield case("flatten.using_ints", x(2, 4, 8))
    yield case("squeeze.default", x(4, 1, 2, 8))
    yield case("squeeze.dim", x(4, 1, 2, 8), 1)
    yield case("squeeze.dim", x(4, 1, 2, 8), 2)
    yield case("squeeze.dims", x(4, 1, 2, 1, 8), (1, 2, 3))
    yield case("unflatten.int", x(2, 24), 1, (3, -1, 2))
    yield case("unsqueeze.default", x(4, 8), -1)
    yield case("one_hot.default", n(4, 4, 8), 4)
    yield case("view_as_real.default", z(4, 8))
    yield case("view_as_complex.default", x(4, 8, 2))
    yield case("permute.default", x(2, 4, 8, 4), (0, -1, 1, 2))
    yield case("transpose.int", x(2, 4, 8), 1, -1)
    for target in ("swapaxes", "swapdims"):
        yield case(f"{target}.default", x(2, 4, 8), 0, 2)
    yield case("t.default", x(4, 8))
    yield case("t.default", x(4))
    for target in ("mT", "mH"):
        yield case(f"{target}.default", x(2, 4, 8))
    yield case("matrix_H.default", x(4, 8))
    yield case("numpy_T.default", x(4, 8))
    yield case("movedim.int", x(2, 4, 8, 4), 1, -1)
    yield case("movedim.intlist", x(2, 4, 8, 4), (3, 0), (0, 2))
    yield case("repeat.default", x(4, 8), (4, 2, 4))
    yield case("tile.default", x(2, 4, 8), (4, 2))
    yield case("tile.default", x(4), (4, 4))
    yield case("unfold.default", x(2, 4, 8, 4), 2, 4, 2)
    yield case("repeat_interleave.self_int", x(4, 8), 4, 1)


def parts() -> Iterator[Case]:
    yield case("slice.Tensor", x(4, 8, 4), 1, 0, 4)
    yield case("slice.Tensor", x(4, 8), 1, 0, 9223372036854775807)
    yield case("slice.Tensor", x(4, 8), 1, -8, 8)
    yield case("slice.Tensor", x(4, 8), 1, 0, 8, 2)
    yield case("slice.Tensor", x(4, 8), 1, 0, 0)
    yield case("cat.default", (x(4, 0), x(4, 8)), 1)
    yield case("split_with_sizes.default", x(4, 8), (0, 8), 1)
    yield case("narrow.default", x(4, 8), 1, 0, 8)
    yield case("narrow.default", x(4, 8), 1, 2, 4)
    yield case("select.int", x(4, 8, 4), 1, -1)
    yield case("unbind.int", x(3, 4, 8))
    yield case("unbind.int", x(4, 8, 3), -1)
    yield case("split.Tensor", x(4, 8), 4, 1)
    yield case("split.Tensor", x(4, 8), 3, -1)
    yield case("split.Tensor", x(4, 8), 100, 1)
    yield case("split.sizes", x(8, 4), (4, 4))
    yield case("split_with_sizes.default", x(4, 12), (4, 4, 4), -1)
    yield case("split_with_sizes.default", x(4, 12), (4, 8), 1)
    yield case("chunk.default", x(4, 12), 3, 1)
    yield case("chunk.default", x(4, 16), 7, 1)
    yield case("chunk.default", x(4, 8), 3, 1)
    yield case("glu.default", x(4, 8))
    yield case("glu.default", x(8, 4), 0)
    yield case("tensor_split.indices", x(4, 8, 4), (1,), 1)
    yield case("tensor_split.indices", x(8, 4), (4,))
    yield case("tensor_split.sections", x(4, 8), 2, -1)
    yield case("hsplit.int", x(4, 8), 2)
    yield case("topk.default", x(4, 8), 3)
    yield case("topk.default", x(4, 8), 4, 0)
    for target in ("cat", "concat"):
        yield case(f"{target}.default", (x(4, 4), x(4, 4), x(4, 4)), -1)
    yield case("cat.default", (x(4, 4), x(4, 8)), 1)
    same = x(4, 4)
    yield case("cat.default", (same, same))
    yield case("stack.default", (x(4, 8), x(4, 8)), -1)
    yield case("stack.default", (x(4, 8), x(4, 8), x(4, 8)))
    yield case("index.Tensor", x(8, 4), (n(8, 4, 4),))
    yield case("index.Tensor", x(4, 8, 4), (None, n(8, 4)))
    yield case("index.Tensor", x(4, 8, 4, 4), (None, n(8, 4, 1), n(4, 8)))
    yield case("index.Tensor", x(8, 4, 8), (n(8, 4), None, n(8, 4)))
    yield case("index_select.default", x(4, 8, 4), 1, n(8, 12))
    yield case("gather.default", x(4, 8, 4), 1, n(8, 4, 4, 4))
    yield case("gather.default", x(4, 8), 1, n(8, 2, 4))
    yield case("take_along_dim.default", x(4, 8, 4), n(8, 4, 4, 4), 1)


def mixtures() -> Iterator[Case]:
    yield case("roll.default", x(4, 8, 4), (1,), (1,))
    yield case("roll.default", x(4, 8), (3,))
    yield case("flip.default", x(4, 8), (-1,))
    yield case("cumsum.default", x(4, 8), 1)
    yield case("argsort.default", x(4, 8), 1)
    yield case("argsort.default", x(4, 8))
    yield case("sort.default", x(4, 8))
    yield case("sort.default", x(4, 8), 0, True)
    yield case("cumprod.default", x(4, 8), 0)
    for name in ("cummax", "cummin", "logcumsumexp"):
        yield case(f"{name}.default", x(4, 8), 1)
    yield case("tril.default", x(4, 4, 8))
    yield case("triu.default", x(4, 4, 8), 1)
    yield case("sum.default", x(4, 8))
    yield case("sum.dim_IntList", x(2, 4, 8), (0, -1))
    yield case("sum.dim_IntList", x(2, 4, 8), (1,), True)
    for name in ("amax", "amin"):
        yield case(f"{name}.default", x(2, 4, 8), (1,), True)
    yield case("mean.default", x(4, 8))
    yield case("mean.dim", x(2, 4, 8), (1,))
    yield case("mean.dim", x(2, 4, 8), (-1,), True)
    yield case("mean.dim", x(2, 4, 8), (1, 2), dtype=torch.float64)
    for name in ("max", "min"):
        yield case(f"{name}.default", x(4, 8))
        yield case(f"{name}.dim", x(4, 8), 1)
    for name in ("all", "any"):
        yield case(f"{name}.dim", b(4, 8), 1)
        yield case(f"{name}.dim", b(4, 8), -1, True)
    for name in ("argmax", "argmin"):
        yield case(f"{name}.default", x(4, 8), 1)
    yield case("argmax.default", x(4, 8))
    yield case("logsumexp.default", x(4, 8), (1,))
    yield case("median.dim", x(4, 8), 1)
    yield case("quantile.scalar", x(4, 8), 0.3, 1)
    yield case("linalg_vector_norm.default", x(4, 8), 2, (-1,), True)
    yield case("norm.ScalarOpt_dim", x(4, 8), 2, (1,))
    yield case("prod.dim_int", x(4, 8), 1)
    for name in ("std", "var"):
        yield case(f"{name}.dim", x(4, 8), (1,))
        yield case(f"{name}.correction", x(4, 8), (1,), correction=0, keepdim=True)
    yield case("var_mean.correction", x(4, 8), (1,), correction=1)


def counted() -> Iterator[Case]:
    """Counter-based random numbers with samples along any dim; some shards begin inside a counter's four words."""
    for samples, shape, dim, outer in (
        (4, (4, 8), 0, 1), (4, (8, 4, 12), 1, 1), (4, (64, 3), 0, 4), (2, (8, 4), 0, 1), (4, (8, 12), -1, 1),
    ):  # fmt: skip
        draws = counter_rows(1 << 40, 3, 5, samples)
        yield Case("autopar.uniform.default", (draws, shape, "name", dim, outer))


def unsplit() -> Iterator[Case]:
    """Operations that are never split, and those whose layout follows their operand."""
    yield case("new_empty.default", x(4, 8), (4, 1))
    yield case("new_full.default", x(4, 8), (4, 1), 2.0)
    yield case("new_ones.default", x(4, 8), (4,))
    yield case("new_zeros.default", x(4, 8), (4,))
    yield case("dropout.default", x(4, 8), 0.5, True)
    yield case("dropout.default", x(4, 8), 0.5, False)
    yield case("dropout.default", x(4, 8), 0.0, True)
    yield case("feature_dropout.default", x(4, 8), 0.5, True)
    yield case("alpha_dropout.default", x(4, 8), 0.5, True)
    yield case("feature_alpha_dropout.default", x(4, 8), 0.5, True)
    yield case("rrelu.default", x(4, 8), 0.1, 0.3, True)
    yield case("bernoulli.default", fixed(4, 8))
    yield case("bernoulli.p", fixed(4, 8), 0.5)
    yield case("randint_like.default", fixed(4, 8), 4)
    for name in ("exponential", "normal_functional", "rand_like", "randn_like", "uniform"):
        yield case(f"{name}.default", fixed(4, 8))
    for name in ("empty.memory_format", "ones.default", "rand.default", "randn.default", "zeros.default"):
        yield case(name, (4, 8))
    yield case("arange.default", 8)
    yield case("eye.default", 8)
    yield case("full.default", (4, 8), 2.0)
    yield case("linspace.default", 0, 1, 8)
    yield case("logspace.default", 0, 1, 8)
    yield case(
        "lstm.input", x(2, 4, 4), (x(1, 2, 4), x(1, 2, 4)), (x(16, 4), x(16, 4)), False, 1, 0.0, True, False, True
    )
    yield case("gru.input", x(2, 4, 4), x(1, 2, 4), (x(12, 4), x(12, 4)), False, 1, 0.0, True, False, True)
    for name in ("rnn_relu", "rnn_tanh"):
        yield case(f"{name}.input", x(2, 4, 4), x(1, 2, 4), (x(4, 4), x(4, 4)), False, 1, 0.0, True, False, True)
    yield case("meshgrid.indexing", (x(4), x(8)), indexing="ij")
    yield case("normal.float_float", 0.0, 1.0, (4, 8))
    yield case("randint.default", 8, (4,))
    yield case("randperm.default", 8)
    yield case("scalar_tensor.default", 2.0)
    yield case("tril_indices.default", 4, 4)
    yield case("triu_indices.default", 4, 4)


def all_cases() -> list[Case]:
    """Every case, with equal random numbers in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tables = (
            per_element, products, convolutions, attention, normalisations, pixels, reshapes, parts, mixtures, counted,
            unsplit,
        )  # fmt: skip
        return [each for table in tables for each in table()]
