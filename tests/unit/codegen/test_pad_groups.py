"""Convolutions with padded groups, against torch's."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.codegen import compile as compiled
from autopar.codegen.emit import graph_module
from autopar.codegen.fusions.pad_groups import pad_groups
from autopar.codegen.split import split
from autopar.ir.program import Program
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model
from autopar.trace.trace import weight_tensors

PADDED = "autopar.padded_convolution.default"
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
# Input and output channels, groups.
WIDTHS = {
    "24": (48, 48, 2), "40 to 20": (80, 40, 2), "3 to 6": (12, 24, 4), "4 to 24": (8, 48, 2), "24 to 4": (48, 8, 2),
}  # fmt: skip
# Kernel, stride, padding, dilation.
WINDOWS = ((3, 1, 1, 1), (3, 2, 1, 1), (3, 1, 2, 2), (1, 1, 0, 1))


def results(convolution: nn.Module, x: Tensor, padded: bool) -> list[Tensor]:
    """The result, and gradients of the operand and of the parameters."""
    given = x.clone().requires_grad_()
    parameters = list(convolution.parameters())
    if padded:
        weight, bias = parameters[0], parameters[1] if len(parameters) > 1 else None
        strides = (list(getattr(convolution, name)) for name in ("stride", "padding", "dilation"))
        made = torch.ops.autopar.padded_convolution(given, weight, bias, *strides, convolution.groups)
    else:
        made = convolution(given)
    return [made, *torch.autograd.grad(made.square().sum(), [given, *parameters])]


def arranged(module: nn.Module, x: Tensor, channels_last: bool) -> tuple[nn.Module, Tensor]:
    if not channels_last:
        return module, x
    layout = FORMATS[x.dim() - 2]
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous(memory_format=layout) if parameter.dim() > 3 else parameter.data
    return module, x.contiguous(memory_format=layout)


CASES = [
    (dims, layout, size) for dims, layout, size in product((1, 2, 3), (False, True), (6, 1)) if dims > 1 or not layout
]


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize(("dims", "channels_last", "size"), CASES)
def test_a_padded_convolution_is_the_convolution(
    widths: tuple[int, int, int], dims: int, channels_last: bool, size: int
) -> None:
    """In values and in layouts, with any stride, padding and dilation."""
    torch.manual_seed(0)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    x = torch.randn(2, widths[0], *[size] * dims, dtype=torch.float64)
    for (kernel, stride, padding, dilation), bias in zip(WINDOWS, (True, False, True, False), strict=True):
        plain = kind(*widths[:2], kernel, stride, padding, dilation, widths[2], bias, dtype=torch.float64)
        plain, given = arranged(plain, x, channels_last)
        for ours, theirs in zip(results(plain, given, True), results(plain, given, False), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("channels_last", [False, True])
def test_in_16_bits_it_is_as_near(channels_last: bool) -> None:
    torch.manual_seed(0)
    plain, x = arranged(nn.Conv2d(48, 48, 3, padding=1, groups=2), torch.randn(2, 48, 9, 9), channels_last)
    plain, x = plain.bfloat16(), x.bfloat16()
    exact = results(plain.double(), x.double(), False)
    for ours, theirs in zip(results(plain.bfloat16(), x, True), exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - theirs).abs().max() < 0.01 * theirs.abs().max()


# -- which convolutions -----------------------------------------------------------------------------------------------


def program_of(model: nn.Module, x: Tensor, precision: Any = "bf16") -> tuple[Program, dict[str, Tensor]]:
    """As traced, and the weights."""
    graph = lower_model(model, as_call(model, x), "train", "model", precision)
    (program,) = split(graph, {op.name: 0 for op in graph.ops}, 1)
    weights = weight_tensors(model, graph)
    held = {w.name: weights[w.name].detach().to(getattr(torch, w.dtype)) for w in graph.weights}
    return program, {w.name: held[w.name].requires_grad_(w.requires_grad) for w in graph.weights}


IMAGE = (2, 48, 8, 8)


@pytest.mark.parametrize(
    ("convolution", "shape", "precision"),
    [
        (nn.Conv2d(48, 48, 3, groups=2), IMAGE, "bf16"),
        (nn.Conv2d(48, 48, 3, groups=2), IMAGE, "fp16"),
        (nn.Conv2d(48, 48, 3, groups=2, bias=False), IMAGE, "bf16-params"),
        (nn.Conv2d(48, 64, (3, 1), (2, 1), (1, 0), groups=2), IMAGE, "bf16"),  # 24 to 32
        (nn.Conv2d(64, 48, 3, groups=2), (2, 64, 8, 8), "bf16"),
        (nn.Conv1d(48, 48, 3, groups=16), (2, 48, 8), "bf16"),
        (nn.Conv3d(48, 48, 3, groups=4), (2, 48, 4, 4, 4), "bf16"),
        (nn.Conv2d(400, 400, 1, groups=2), (2, 400, 2, 2), "bf16"),
    ],
)
def test_these_are_padded(convolution: nn.Module, shape: tuple[int, ...], precision: str) -> None:
    program, weights = program_of(nn.Sequential(convolution, nn.Tanh()), torch.randn(shape), precision)
    changed = pad_groups(program)
    assert [op.target for op in changed.ops if "conv" in op.target] == [PADDED]
    made = []
    for one in (program, changed):
        (result,) = graph_module(one, weights, torch.device("cpu"))(torch.ones(shape))
        assert result.stride() == program.ops[-1].outputs[0].stride
        made.append(result)
    torch.testing.assert_close(*made, atol=0.01, rtol=0.02)  # rounded before the bias is added


@pytest.mark.parametrize(
    ("convolution", "shape", "precision"),
    [
        (nn.Conv2d(48, 48, 3, groups=2), IMAGE, "fp32"),
        (nn.Conv2d(48, 48, 3), IMAGE, "bf16"),
        (nn.Conv2d(48, 48, 3, groups=48), IMAGE, "bf16"),
        (nn.Conv2d(48, 144, 3, groups=48), IMAGE, "bf16"),  # of one channel, three filters for each
        (nn.Conv2d(64, 32, 3, groups=2), (2, 64, 8, 8), "bf16"),
        (nn.Conv2d(600, 600, 1, groups=2), (2, 600, 2, 2), "bf16"),  # of 300 channels
        (nn.Conv2d(48, 48, 3, groups=2), (48, 8, 8), "bf16"),  # no dim of samples
        (nn.ConvTranspose2d(48, 48, 3, groups=2), IMAGE, "bf16"),
    ],
)
def test_others_stay(convolution: nn.Module, shape: tuple[int, ...], precision: str) -> None:
    program, _ = program_of(nn.Sequential(convolution, nn.Tanh()), torch.randn(shape), precision)
    assert pad_groups(program) == program


# -- compiled ---------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """A block of RegNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(48, 48, 1, bias=False), nn.BatchNorm2d(48)
        self.conv2, self.norm2 = nn.Conv2d(48, 48, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(48)
        self.conv3 = nn.Conv2d(48, 48, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv3(self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())).relu())


def test_a_compiled_block_is_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """By inductor, in channels last."""
    monkeypatch.setattr(compiled, "COMPILED_REGIONS", {})
    torch.manual_seed(0)
    model, x = Bottleneck().to(memory_format=torch.channels_last), torch.randn(2, 48, 6, 6)
    x = x.contiguous(memory_format=torch.channels_last)
    program, weights = program_of(model, x, "bf16")
    trained = [w for w in weights.values() if w.requires_grad]
    found = []
    for one, is_compiled in ((program, False), (pad_groups(program), True)):
        module = graph_module(one, weights, torch.device("cpu"), compiled=is_compiled)
        (made,) = module(x)
        found.append((made, *torch.autograd.grad(made.float().square().sum(), trained)))
    assert PADDED in {op.target for op in pad_groups(program).ops}
    for ours, theirs in zip(*found, strict=True):
        assert ours.stride() == theirs.stride()
        assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()


def test_compiled_stages_on_cuda_have_padded_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    program, weights = program_of(nn.Sequential(nn.Conv2d(48, 48, 3, groups=2), nn.Tanh()), torch.randn(IMAGE))
    for device, wanted in (("cuda", True), ("cuda", False), ("cpu", True)):
        monkeypatch.setattr(compiled, "COMPILED_REGIONS", {})
        module = graph_module(program, weights, torch.device(device), compiled=wanted)
        codes = [m.code for m in module.modules() if isinstance(m, fx.GraphModule)]
        codes += [code.source.build().code for code in compiled.COMPILED_REGIONS.values()]
        assert any("padded_convolution" in code for code in codes) == (wanted and device == "cuda")
