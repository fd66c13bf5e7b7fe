"""Sharded plans that were written or edited by hand: what runs, and the field that an error names."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from support.handmade import in_threads, plan_by_hand
from support.hardware import slow_compute
from support.mesh_models import MODELS
from torch import nn

import autopar
from autopar import PlanError, VariantWarning
from autopar.api.program_cache import ProgramCache
from autopar.trace.call import as_call


class Small(nn.Module):
    """A convolution with batch norm, two products, and a tensor that the trace takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).mean((2, 3)) * torch.tensor([0.5, 1.0, 1.5, 2.0])
        return self.fc2(torch.relu(self.fc1(x)))


def programs(strategies: Mapping[str, str], shardings: Mapping[str, str]) -> ProgramCache:
    model, x = Small(), torch.randn(4, 3, 6, 6)
    plan = plan_by_hand(model, x, 2, [], tp=2, strategies=strategies, shardings=shardings)
    return ProgramCache(model, plan, as_call(model, x))


@pytest.mark.parametrize(
    ("layout", "local"),
    [("tp:0", (4, 4)), ("tp:0x2", (4, 4)), ("tp:1", (8, 2)), ("tp:gradient", (8, 4)), ("replicated", (8, 4))],
)
def test_a_weight_may_lie_otherwise_than_it_is_read(layout: str, local: tuple[int, ...]) -> None:
    found = programs({"fc1.linear": "n"}, {"fc1.weight": layout})
    for variant in found.specializations.values():
        assert {w.name: w.shape for w in variant.programs[0].weights}["fc1.weight"] == local
        assert next(op for op in variant.programs[0].ops if op.name == "fc1.linear").outputs[0].shape == (2, 4)


@pytest.mark.parametrize(
    ("shardings", "message"),
    [
        ({"fc9.weight": "tp:0"}, r"field shardings: the model has no 'fc9\.weight'. Did you mean fc[12]\.weight\?"),
        ({"fc1.weight": "tp:2"}, r"shardings\.fc1\.weight: it has shape \[8, 4\] and cannot lie as 'tp:2' on 2 ranks"),
        ({"fc1.weight": "tp:0x3"}, r"shardings\.fc1\.weight: .* cannot lie as 'tp:0x3' on 2 ranks"),
        ({"fc1.weight": "tp:sum"}, r"shardings\.fc1\.weight: .* cannot lie as 'tp:sum' on 2 ranks"),
        ({"fc1.weight": "tp:0 tp:1"}, r"shardings\.fc1\.weight: .* cannot lie as 'tp:0 tp:1' on 2 ranks"),
        ({"fc1.weight": "tp:0 tp:gradient"}, r"shardings\.fc1\.weight: .* cannot lie as 'tp:0 tp:gradient'"),
        ({"fc1.weight": "dp:0"}, r"shardings\.fc1\.weight: .* cannot lie as 'dp:0' on 2 ranks"),
        ({"fc1.weight": "dp:gradient"}, r"shardings\.fc1\.weight: .* cannot lie as 'dp:gradient' on 2 ranks"),
        ({"norm.running_var": "tp:0"}, r"shardings\.norm\.running_\w+: norm\.batch_norm updates it in place and"),
        ({"norm.num_batches_tracked": "tp:gradient"}, r"shardings\.norm\.num_batches_tracked: .* Write 'replicated'\."),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_be_names_its_field(shardings: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        programs({}, shardings)


def test_a_constant_is_not_sharded() -> None:
    constant = next(w.name for w in programs({}, {}).example.weights if w.kind == "constant")
    with pytest.raises(PlanError, match=rf"shardings\.{constant}: it is a constant of the trace"):
        programs({}, {constant: "tp:0"})


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        ({"fc9.linear": "n"}, r"field strategies: the model has no 'fc9\.linear'"),
        ({"fc1.linear": "q"}, r"strategies: fc1\.linear \(aten\.linear\.default\) cannot run split by 'q' on 2 ranks"),
        ({"fc1.linear": "nx3"}, r"strategies: fc1\.linear .* cannot run split by 'nx3' on 2 ranks.* 'n': 8"),
    ],
)
def test_a_strategy_that_cannot_be_names_its_field(strategies: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        programs(strategies, {})


@pytest.mark.full
@pytest.mark.parametrize("batch", [10, 12])
def test_a_plan_fits_the_microbatch_that_it_chose(tmp_path: Path, batch: int) -> None:
    """Sharding is decided on a trace with fewer samples; windows of an image then share a dim with them."""
    model, x = MODELS["swin"].make(), MODELS["swin"].x()[:batch]
    plan = autopar.plan(model, 2, x, hardware=str(slow_compute(tmp_path)), memory="64GiB", tp=2)
    assert plan.microbatches == 1 and plan.strategies
    assert ProgramCache(model, plan, as_call(model, x)).example.batch == batch


class Scaled(nn.Module):
    """Takes other paths for 1, 1.0 and True, which are equal, and for 0.0 and -0.0."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, scale: Any = 1.0, *, images: torch.Tensor | None = None) -> torch.Tensor:
        x = self.fc(x) + (0.0 if images is None else images.mean())
        if isinstance(scale, torch.Tensor):
            return x * scale
        if isinstance(scale, bool):
            return x + 100
        if isinstance(scale, int):
            return x - 100
        return x * scale if scale or str(scale) == "0.0" else x * 7


def scaled(**example: Any) -> tuple[Scaled, Any]:
    model, call = Scaled().eval(), {"x": torch.randn(4, 3), "scale": 1.0} | example
    return model, in_threads(model, plan_by_hand(model, call, 1, []), call, lambda out, y: out.mean()).eval()


def test_equal_constants_of_different_types_have_traces_of_their_own() -> None:
    model, pm = scaled()
    x = torch.randn(4, 3)
    for scale in (1.0, 1, True, 0.0, -0.0, torch.tensor(2.5)):
        assert torch.equal(pm(x, scale), model(x, scale)), scale


def test_a_nan_is_traced_once() -> None:
    _, pm = scaled()
    x = torch.randn(4, 3)
    for _ in range(3):
        assert pm(x, inf - inf).isnan().all()  # a new NaN
    assert len(pm._programs.specializations) == 3


@pytest.mark.parametrize(
    ("example", "call", "message"),
    [
        ({}, lambda x, i: {"x": x, "scale": 2 + i / 4}, r"value of `scale` is one: 1\.0, 2\.0, 2\.25, 2\.5, … \(20"),
        pytest.param(
            {}, lambda x, i: {"x": torch.randn(i + 5, 3), "scale": 1.0}, r"first size of `x`.*: 4, 5, 6, 7, … \(20",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"images": torch.zeros(2, 2)},
            lambda x, i: {"x": x, "scale": 1.0 + i % 2, "images": torch.ones(2, i + 3)},
            r"shape of `images` without its first dim is one: \[2\], \[3\], \[4\], \[5\], … \(20",
            marks=pytest.mark.full,
        ),
    ],
    ids=["a constant", "samples", "a shape"],
)  # fmt: skip
def test_the_twentieth_variant_is_told_what_changes(example: Any, call: Any, message: str) -> None:
    _, pm = scaled(**example)
    x = torch.randn(4, 3)
    for i in range(18):
        pm(**call(x, i))
    with pytest.warns(VariantWarning, match=f"Scaled has been traced for 20 variants.*{message} so far") as caught:
        pm(**call(x, 18))
    assert caught[0].filename == __file__
    for i in range(19, 22):
        pm(**call(x, i))  # warns once: pytest takes a warning for an error
