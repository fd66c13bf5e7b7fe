"""`autopar check`: differences, dropout that is switched off, and comparisons with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import CASES, DTYPES
from support.effort import only
from support.hardware import nodes_of_two, slow_compute
from support.models import ManyOutputs, TwoInputs, tiny_vit
from support.parity import images
from torch import nn

import autopar
from autopar.errors import UnknownOpWarning, UsageError
from autopar.ir.plan import Precision
from autopar.ir.plan_parts import ZeroStage
from autopar.tools.parity.compare import (
    compare,
    copy_without_dropout,
    default_loss,
    mean_of_squares,
    random_operations,
    tolerance_scale,
    training_graph,
)
from autopar.tools.parity.difference import DOUBLE, compared, difference, update_rounding
from autopar.trace.call import as_call

ONES = torch.ones(4)
INF = float("inf")


@pytest.mark.parametrize(
    ("actual", "expected", "ok"),
    [
        (ONES, ONES, True),
        (ONES + 1e-4, ONES, True),
        (ONES + 2e-4, ONES, False),
        (ONES * 1e-6 * (1 + 5e-2), ONES * 1e-6, True),  # rounding noise of the size of 1e-7
        (ONES * 1e-5 * 1.5, ONES * 1e-5, False),  # 5e-6 off, which an absolute 1e-5 would let pass
        (torch.zeros(4), ONES * 1e-5, False),
        (ONES.double(), ONES, False),
        (torch.ones(5), ONES, False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), False),
        (torch.tensor([INF]), torch.tensor([INF]), False),
        (torch.tensor([3]), torch.tensor([3]), True),
        (torch.tensor([1e3, 1e-3]), torch.tensor([1e3, 0.0]), True),
        (torch.tensor([1e3, 1e-2]), torch.tensor([1e3, 0.0]), False),
        (torch.tensor([3]), torch.tensor([4]), False),
        (torch.empty(0), torch.empty(0), True),
    ],
)
def test_tolerance(actual, expected, ok):
    assert (difference(actual, expected).excess <= 1) is ok


@pytest.mark.parametrize(
    ("actual", "expected", "ok"),
    [
        ([-INF, 1.0], [-INF, 1.0 + 5e-5], True),
        ([-INF, 1.0], [-INF, 1.1], False),
        ([-INF], [INF], False),
        ([1.0], [INF], False),
    ],
)
def test_infinities_that_both_have_are_equal_in_buffers(actual, expected, ok):
    ours, theirs = [("bound", torch.tensor(actual))], [("bound", torch.tensor(expected))]
    assert compared("buffers", ours, theirs, infinities=True).ok is ok
    assert compared("buffers", ours, theirs, theirs, update_rounding("bfloat16", 1e-3), infinities=True).ok is ok
    assert not compared("outputs", ours, theirs).ok


class Upcast(nn.Linear):
    """Returns float64, however it computes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).double()


@pytest.mark.parametrize(
    ("model", "scale"), [(Upcast(4, 3).double(), DOUBLE), (Upcast(4, 3), 1.0), (nn.Linear(4, 3).double(), DOUBLE)]
)
def test_the_tolerance_is_smaller_where_all_is_computed_in_float64(model, scale):
    x = torch.randn(4, 4, dtype=model.weight.dtype)
    assert tolerance_scale(training_graph(model, as_call(model, x))) == scale
    rounded = torch.full((4,), 1 + 1e-7, dtype=torch.float64)
    assert (difference(rounded, ONES.double(), scale).excess <= 1) is (scale == 1)


def test_a_row_names_the_worst_tensor():
    row = compared("weights", [("a", ONES), ("b", ONES + 1e-3)], [("a", ONES), ("b", ONES)])
    assert (row.num_tensors, row.ok, row.bitwise, row.worst) == (2, False, False, "b")
    assert row.max_absolute == pytest.approx(1e-3, rel=1e-3)
    assert row.max_relative == pytest.approx(1e-3, rel=1e-3)


def test_a_missing_tensor_is_a_failure():
    row = compared("gradients", [("a", ONES)], [("a", ONES), ("b", ONES)])
    assert (row.ok, row.worst) == (False, "b: only in the model on one device")


def test_dropout_and_drop_path_are_switched_off_in_a_copy():
    model = tiny_vit(depth=2, drop_rate=0.1, drop_path_rate=0.2)
    x = torch.randn(2, 3, 32, 32)
    assert random_operations(training_graph(model, as_call(model, x)))
    quiet, notes = copy_without_dropout(model)
    assert not random_operations(training_graph(quiet, as_call(quiet, x)))
    assert "2 × DropPath (0.2)" in notes[0] and "× Dropout (0.1)" in notes[0]
    assert model.blocks[1].drop_path1.drop_prob == pytest.approx(0.2)  # type: ignore[union-attr,index]


class Functional(nn.Module):
    """A probability that only its forward reads, as in Hugging Face's models, and a module of an equal name."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.layers = 0.1, nn.ModuleDict({"dropout": nn.Dropout(0.2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["dropout"](F.dropout(x, self.dropout, self.training))


def test_probabilities_of_functional_dropout_are_switched_off_too():
    model = Functional()
    quiet, notes = copy_without_dropout(model)
    assert not random_operations(training_graph(quiet, as_call(quiet, torch.randn(2, 4))))
    assert notes == ["switched off for the comparison: 1 × Dropout (0.2), 1 × Functional (0.1)"]


def test_the_loss_keeps_float64():
    output = torch.tensor([1.0, 1e-12], dtype=torch.float64)
    assert mean_of_squares(output, None).dtype == torch.float64
    assert mean_of_squares([output, output.half()], None).dtype == torch.float64


def test_the_loss_fits_the_output():
    logits = nn.Linear(4, 3)
    assert (
        default_loss(logits, as_call(logits, torch.randn(5, 4)))[2] == "cross entropy with random labels of 3 classes"
    )
    single = nn.Linear(4, 1)  # whose cross entropy would be zero whatever it computes
    assert default_loss(single, as_call(single, torch.randn(5, 4)))[2] == "mean of squares over all outputs"


class Auxiliary(nn.Module):
    """A second output in training only, with batch norm, as in torchvision's GoogLeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.relu(self.norm(self.first(x)))
        return (self.second(h), h.mean(1)) if self.training else self.second(h)


@pytest.mark.parametrize(
    "model", [Auxiliary(), nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.Flatten(0, 1))]
)
def test_the_loss_fits_what_is_returned_in_training(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss_fn, target, name = default_loss(model, as_call(model, torch.randn(5, 4)))
    assert name == "mean of squares over all outputs"
    assert loss_fn(model(torch.randn(5, 4)), target).item() > 0
    model = model.eval()
    assert default_loss(model, as_call(model, torch.randn(5, 4)))[2] == name and not model.training
    assert Auxiliary().norm.num_batches_tracked == state.get("norm.num_batches_tracked", 0)


def test_frozen_submodules_stay_frozen_in_both():
    norm = nn.BatchNorm1d(6).eval()
    model = nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 3))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    parity = compare(model, x, y, loss_fn=F.cross_entropy, devices=2, steps=2, microbatches=2)
    assert parity.ok, parity.rows
    default_loss(model, as_call(model, x))
    assert model.training and not norm.training


def test_outputs_that_grow_otherwise_are_equal_on_two_devices():
    parity = compare(ManyOutputs(), torch.randn(8, 8), devices=2, steps=1, microbatches=2)
    assert parity.ok, parity.rows
    assert {row.quantity: row.num_tensors for row in parity.rows}["outputs, eval mode"] == 3


def test_two_inputs_and_a_dict_of_outputs_are_equal_on_two_devices():
    x = {"image": torch.randn(5, 3, 16, 16), "text": torch.randn(5, 6)}
    parity = compare(TwoInputs(), x, devices=2, steps=2, microbatches=2)
    assert parity.ok
    counts = {row.quantity: row.num_tensors for row in parity.rows}
    assert counts["outputs, train mode"] == 6 and counts["loss"] == 2
    assert counts["weights after 2 steps"] == 10 and counts["buffers after 2 steps"] == 1
    assert counts["outputs, eval mode"] == 3


class Positions(nn.Module):
    """Replaces its buffer at the first forward by one of another shape, as ConViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.positions) != x.shape[1]:
            self.positions = torch.arange(x.shape[1], dtype=x.dtype)
        return x + self.positions


class Average(nn.Module):
    """Subtracts a moving average, a buffer that each forward in training assigns to or updates in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x - self.average
        if self.training and self.in_place:
            self.average.mul_(0.9).add_(0.1 * x.mean(0).detach())
        elif self.training:
            self.average = 0.9 * self.average + 0.1 * x.mean(0).detach()
        return result


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 2}])
def test_models_that_update_buffers_are_equal_to_one_device(mesh: dict[str, Any]) -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), Positions(), Average(in_place=False), nn.Linear(4, 4), Average(in_place=True)
    )
    parity = compare(model, torch.randn(8, 4), **mesh, microbatches=2)
    assert parity.ok, [row for row in parity.rows if not row.ok]
    assert any(row.quantity.startswith("buffers") and row.num_tensors == 2 for row in parity.rows)


def test_arguments_of_compare():
    with pytest.raises(UsageError, match="steps=0 must be at least 1"):
        compare(nn.Linear(2, 2), torch.ones(2, 2), steps=0)
    with pytest.raises(UsageError, match="Pass both a target and a loss_fn"):
        compare(nn.Linear(2, 2), torch.ones(2, 2), torch.ones(2))


@pytest.mark.parametrize(("given", "compiled"), [({}, False), ({"compile": None}, False), ({"compile": True}, True)])
def test_stages_are_compiled_where_that_is_asked_for(
    given: dict[str, Any], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parallelize(*_: Any, **options: Any) -> None:
        raise InterruptedError(options["compile"])

    monkeypatch.setitem(compare.__globals__, "parallelize", parallelize)
    with pytest.raises(InterruptedError, match=str(compiled)):
        compare(nn.Linear(4, 4), torch.randn(4, 4), **given)


@pytest.mark.parametrize(
    ("wrong", "ok"),
    [
        ([], True),
        ([(0, -1.0)], True),  # rounding decided the sign of one gradient
        ([(i, 0.0) for i in range(48)], False),  # never updated
        ([(i, -1.0) for i in range(8)], False),
        ([(i, 1.5) for i in range(48)], False),  # another learning rate
    ],
)
def test_updates_in_bfloat16(wrong, ok):
    torch.manual_seed(0)
    before, update = torch.randn(48), 1e-3 * torch.randn(48).sign()
    actual = before + update
    for index, factor in wrong:
        actual[index] = before[index] + factor * update[index]
    rounding = update_rounding("bfloat16", 1e-3)
    assert compared("weights", [("w", actual)], [("w", before + update)], [("w", before + update)], rounding).ok is ok


AUTOCAST = [
    ("convolutions", (2, 1, 1), "bf16"),
    ("vit", (1, 2, 1), "bf16"),
    ("tied", (1, 1, 2), "bf16"),
    ("vit", (2, 1, 1), "fp16"),
]


@pytest.mark.parametrize(("name", "mesh", "precision"), only(AUTOCAST[1:3], AUTOCAST))
def test_processes_equal_autocast(name: str, mesh: tuple[int, int, int], precision: Precision) -> None:
    torch.manual_seed(0)
    make, inputs, classes = CASES[name]
    model, x, y = make(), inputs(), torch.randint(0, classes, (8,))
    pp, tp, dp = mesh
    parity = compare(
        model, x, y, 2, loss_fn=F.cross_entropy, pp=pp, tp=tp, dp=dp, microbatches=2, precision=precision,
        zero=1 if dp > 1 else None,
    )  # fmt: skip
    assert parity.autocast == str(DTYPES[precision]).removeprefix("torch.")
    assert parity.ok, [row for row in parity.rows if not row.ok]
    if precision == "bf16" and mesh == (2, 1, 1):
        assert all(row.bitwise for row in parity.rows)


@pytest.mark.parametrize("zero", only([2], [0, 2]))
def test_processes_that_reduce_in_bfloat16_are_equal_but_for_its_rounding(zero: ZeroStage) -> None:
    torch.manual_seed(0)
    make, inputs, classes = CASES["vit"]
    model, x, y = make(), inputs(), torch.randint(0, classes, (8,))
    parity = compare(model, x, y, 2, loss_fn=F.cross_entropy, dp=2, microbatches=1, zero=zero, reduce_dtype="bfloat16")
    assert (parity.autocast, parity.low, parity.plan.reduce_dtype) == (None, "bfloat16", "bfloat16")
    assert parity.ok, [row for row in parity.rows if not row.ok]
    assert not all(row.bitwise for row in parity.rows)


class FourthBest(nn.Module):
    """An operation without a sharding rule between two that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(1, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).kthvalue(4, -1, keepdim=True).values)


def test_an_operation_without_a_rule_is_replicated_with_one_warning(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hardware = str(slow_compute(tmp_path))
    with pytest.warns(UnknownOpWarning) as caught:
        parity = compare(FourthBest(), torch.randn(8, 8), devices=2, steps=1, tp=2, hardware=hardware)
    unknown = [str(w.message) for w in caught if w.category is UnknownOpWarning]
    assert len(unknown) == 1 and "no sharding rule for: aten.kthvalue.default. Each of the 2 ranks" in unknown[0]
    assert parity.ok and parity.plan.strategies


def test_a_tensor_parallel_group_crosses_nodes_where_asked(tmp_path: Path) -> None:
    """Four processes that the cost model takes for two nodes; by itself a plan keeps such groups inside a node."""
    hardware, x = str(nodes_of_two(tmp_path)), images(8)
    torch.manual_seed(0)
    model = tiny_vit()
    assert autopar.plan(model, 4, x, hardware=hardware).mesh.tp <= 2
    parity = compare(model, x, devices=4, steps=2, tp=4, hardware=hardware)
    assert parity.ok and str(parity.plan.mesh) == "pp 1 × tp 4 × dp 1"
    assert any(layout.startswith("tp:") for layout in parity.plan.shardings.values())
