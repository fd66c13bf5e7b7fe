"""Convolutions of patches as products of matrices, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autopar.codegen import compile as compiled
from autopar.codegen.emit import graph_module
from autopar.codegen.fusions.patch_embed import use_patch_embed
from autopar.codegen.split import split
from autopar.ir.program import Program
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model
from autopar.trace.trace import weight_tensors

PRODUCT = "autopar.patch_convolution.default"


def programs_of(model: nn.Module, x: torch.Tensor) -> tuple[Program, Program, dict[str, torch.Tensor]]:
    """As traced, and with products; and the weights."""
    graph = lower_model(model, as_call(model, x), "train", "model")
    (program,) = split(graph, {op.name: 0 for op in graph.ops}, 1)
    return program, use_patch_embed(program), dict(weight_tensors(model, graph))


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(3, 8, 4, 4), (2, 3, 8, 12)),
        (nn.Conv2d(1, 8, (2, 3), (2, 3), bias=False), (2, 1, 4, 9)),
        (nn.Conv1d(3, 8, 5, 5), (2, 3, 20)),
        (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), (2, 3, 4, 8, 8)),
        (nn.Conv2d(3, 8, 8, 8), (2, 3, 8, 8)),
    ],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_product_for_patches(convolution: nn.Module, shape: tuple[int, ...], channels_last: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    model = nn.Sequential(convolution.double(), nn.Tanh())
    if channels_last and len(shape) == 4:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    program, changed, weights = programs_of(model, x)
    assert [op.target for op in changed.ops] == [PRODUCT, "aten.tanh.default"]
    results = []
    for one in (program, changed):
        given = x.clone().requires_grad_()
        (made,) = graph_module(one, weights, torch.device("cpu"))(given)
        gradients = torch.autograd.grad(made.square().sum(), [given, *weights.values()])
        results.append((made, *gradients))
        if 1 not in made.shape:
            assert made.stride() == program.ops[-1].outputs[0].stride
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(8, 6, 3, padding=1), (2, 8, 1, 1)),
        (nn.Conv2d(3, 6, (3, 5), stride=2, padding=(1, 2), bias=False), (2, 3, 1, 1)),
        (nn.Conv2d(8, 6, 3, padding=2, dilation=2, groups=2), (2, 8, 1, 1)),
        (nn.Conv2d(8, 8, 7, padding=3, groups=8, bias=False), (2, 8, 1, 1)),
        (nn.Conv1d(8, 6, 3, padding=1), (2, 8, 1)),
        (nn.Conv3d(8, 6, (1, 3, 3), padding=(0, 1, 1)), (2, 8, 1, 1, 1)),
    ],
)
def test_a_product_for_one_place(convolution: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    program, changed, weights = programs_of(nn.Sequential(convolution.double(), nn.Tanh()), x)
    assert [op.target for op in changed.ops] == ["autopar.place_convolution.default", "aten.tanh.default"]
    results = []
    for one in (program, changed):
        given = x.clone().requires_grad_()
        (made,) = graph_module(one, weights, torch.device("cpu"))(given)
        results.append((made, *torch.autograd.grad(made.square().sum(), [given, *weights.values()])))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(8, 8, 2, padding=1), (2, 8, 1, 1)),  # of one place makes four
        (nn.Conv2d(8, 8, 3, padding=1, stride=2), (2, 8, 2, 2)),
        (nn.Conv2d(8, 8, 3, padding=3, stride=9, dilation=2), (2, 8, 1, 1)),  # meets padding alone
        (nn.Conv2d(8, 8, 3, padding=6, stride=20), (2, 8, 1, 1)),  # as well, beside it
        (nn.Conv2d(8, 8, 1), (2, 8, 1, 1)),
        (nn.Conv2d(3, 8, 4, 2), (2, 3, 8, 8)),  # patches overlap
        (nn.Conv2d(3, 8, (4, 8), 4), (2, 3, 8, 16)),
        (nn.Conv2d(3, 8, 4, 4), (2, 3, 10, 8)),  # two rows are left out
        (nn.Conv2d(3, 8, 4, 4, padding=2), (2, 3, 8, 8)),
        (nn.Conv2d(3, 8, 2, 2, dilation=2), (2, 3, 8, 8)),
        (nn.Conv2d(3, 9, 4, 4, groups=3), (2, 3, 8, 8)),
        (nn.Conv2d(8, 8, 2, 2), (2, 8, 8, 8)),  # kernels for such channels are fast
        (nn.Conv2d(3, 8, 4, 4, padding="valid"), (2, 3, 8, 8)),
        (nn.Conv2d(3, 8, 4, 4), (3, 8, 8)),  # no dim of samples
        (nn.Conv2d(3, 8, 1), (2, 3, 8, 8)),  # a patch of one pixel
    ],
)
def test_other_convolutions_stay(convolution: nn.Module, shape: tuple[int, ...]) -> None:
    program, changed, _ = programs_of(nn.Sequential(convolution, nn.Tanh()), torch.randn(shape))
    assert changed == program


def test_a_constant_image_has_a_product() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 4, 4)
            self.register_buffer("image", torch.randn(1, 3, 8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.convolution(self.image)

    _, changed, _ = programs_of(Fixed(), torch.randn(2, 4, 2, 2))
    assert changed.ops[0].target == PRODUCT


def test_compiled_stages_have_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILED_REGIONS", {})
    program, _, weights = programs_of(nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Tanh()), torch.randn(2, 3, 8, 8))
    for wanted in (True, False):
        module = graph_module(program, weights, torch.device("cpu"), compiled=wanted)
        codes = [m.code for m in module.modules() if isinstance(m, fx.GraphModule)]
        codes += [code.source.build().code for code in compiled.COMPILED_REGIONS.values()] if wanted else []
        assert any("patch_convolution" in code for code in codes) == wanted
