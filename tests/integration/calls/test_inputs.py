"""Wrong arguments of users, and the errors that name them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.handmade import in_threads, plan_by_hand
from support.models import ManyOutputs, TwoInputs, tiny_vit
from torch import nn

import autopar
from autopar import NonFiniteLossWarning, ParallelModel, PlanError, UsageError, WorkerError

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


X, Y = torch.randn(6, 8), torch.randint(0, 4, (6,))


def switched_loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    """Cross-entropy, or what the target asks for."""
    if isinstance(target, dict):
        cases = {
            "nan": lambda: output.mean() * float("nan"),
            "vector": lambda: output.sum(1),
            "float": lambda: 1.0,
            "detached": lambda: output.detach().mean(),
            "raise": lambda: target["no such key"],
        }
        return cases[target["do"]]()
    return F.cross_entropy(output, target)


@pytest.fixture(scope="module")
def vit() -> Iterator[ParallelModel]:
    """A small ViT on one device, no optimizer."""
    model, x = tiny_vit(depth=1), torch.randn(4, 3, 32, 32)
    with autopar.parallelize(model, 1, x, plan=plan_by_hand(model, x, 2, [])) as pm:
        yield pm


@pytest.fixture(scope="module")
def two() -> Iterator[ParallelModel]:
    model, x = TwoInputs(), {"image": torch.randn(4, 3, 8, 8), "text": torch.randn(4, 6)}
    with autopar.parallelize(model, 1, x, plan=plan_by_hand(model, x, 2, [])) as pm:
        yield pm


IMAGES, LABELS = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))


@dataclass(frozen=True, slots=True)
class Labels:
    classes: torch.Tensor
    note: str = ""


class Boxes:
    def __init__(self, corners: torch.Tensor) -> None:
        self.corners = [corners]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (IMAGES.double(), LABELS, r"Input x of VisionTransformer has dtype float64, expected float32\. .*\.to\("),
        (IMAGES[0], LABELS, r"Input x .* has shape \[3, 32, 32\], expected 4 dims like \['batch', 3, 32, 32\]"),
        ((IMAGES, IMAGES, IMAGES), LABELS, r"got \(\(tensor, tensor, tensor\), {}\), expected \(\(tensor,\), {}\)"),
        ({"pixels": IMAGES}, LABELS, r"do not fit VisionTransformer\.forward.*missing a required argument: 'x'"),
        (torch.randn(4, 3, 24, 24), LABELS, r"inputs of shape \[2, 3, 24, 24\] .* planned for \[2, 3, 32, 32\]"),
        (torch.randn(4, 1, 32, 32), LABELS, r"does not take inputs of shape \[2, 1, 32, 32\]"),
        (IMAGES[:0], LABELS[:0], r"The batch is empty: the first input has shape \[0, 3, 32, 32\]\. Pass at least one"),
        ([IMAGES.tolist()], LABELS, "structure|tensor"),
        (IMAGES.numpy(), LABELS, r"Input x of .* is a ndarray, expected a tensor\. Pass torch\.as_tensor\(input\)"),
        (IMAGES, LABELS.numpy(), r"A target is a numpy array of shape \[4\], .* Pass torch\.as_tensor\(target\)"),
        (IMAGES, LABELS.tolist(), "A target is a list of 4 values for a batch of 4, .*tensor of them, or a tuple"),
        (IMAGES, {"a": LABELS, "b": (list("abcd"),)}, "A target is a list of 4 values for a batch of 4"),
        (IMAGES, Labels(LABELS), "A target is a Labels with tensors in classes, .* Pass a dict or tuple of tensors"),
        (IMAGES, {"a": Boxes(LABELS)}, "A target is a Boxes with tensors in corners, "),
        (IMAGES.clone().requires_grad_(), LABELS, r"The input of shape \[4, 3, 32, 32\] requires grad, .*\.detach\(\)"),
        (IMAGES, torch.rand(4, 10).requires_grad_(), r"The target of shape \[4, 10\] requires grad"),
        (IMAGES, LABELS[:3], r"A target has shape \[3\] for a batch of 4: its first dim must be the batch"),
        (IMAGES, {"a": LABELS, "b": torch.zeros(5, 2)}, r"A target has shape \[5, 2\] for a batch of 4"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit(vit: ParallelModel, x: Any, y: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        vit.forward_backward(x, y)
    assert vit.forward_backward(IMAGES, LABELS).loss > 0  # it still works


def test_outputs_alone_need_no_detached_inputs(vit: ParallelModel) -> None:
    assert vit(IMAGES.clone().requires_grad_()).equal(vit(IMAGES))


def test_a_wrong_shape_brings_no_advice_on_tracing(vit: ParallelModel) -> None:
    with pytest.raises(UsageError) as error:
        vit.forward_backward(torch.randn(4, 3, 24, 24), LABELS)
    assert "itself fails in train mode on inputs of shape [2, 3, 24, 24]: AssertionError: Input" in str(error.value)
    assert "branch on tensor values" not in str(error.value)


def test_keyword_inputs_that_do_not_fit(two: ParallelModel) -> None:
    image, text = torch.randn(4, 3, 8, 8), torch.randn(4, 6)
    for inputs, message in (
        ({"image": image}, "missing a required.* 'text'"),
        ({"image": image, "text": text, "sound": text}, "unexpected keyword argument 'sound'"),
        ({"image": image, "text": text, "gain": 2.0}, "another structure than the example inputs"),
        ({"image": image, "text": [text]}, "another structure"),
        ({"image": image, "text": text.long()}, "Input text .* has dtype int64, expected float32"),
    ):
        with pytest.raises(UsageError, match=message):
            two(**inputs)
    assert two(image=image, text=text)["class"].shape == (4, 5)


def test_no_optimizer_no_scheduler(vit: ParallelModel) -> None:
    with pytest.raises(UsageError, match=r"no optimizer.*functools\.partial"):
        vit.train_step(IMAGES, LABELS)
    with pytest.raises(UsageError, match="no learning-rate scheduler"):
        vit.lr_scheduler.step()


def test_state_dicts_that_do_not_fit(vit: ParallelModel) -> None:
    state = vit.state_dict()
    renamed = {f"module.{n}": t for n, t in state.items()}
    reshaped = state | {"head.bias": torch.zeros(11)}
    for wrong, message in (
        (renamed, r"names missing \['cls_token'.*unknown \['module\.cls_token'"),
        ({n: t for n, t in state.items() if n != "head.bias"}, r"1 names missing \['head\.bias'\], 0 unknown"),
        (reshaped, r"head\.bias in the state dict has shape \[11\], the model's is \[10\]"),
        (
            state | {"head.bias": state["head.bias"].to_sparse()},
            r"head\.bias .* is of layout torch\.sparse_coo, .* dense",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            vit.load_state_dict(wrong)
    assert all(torch.equal(t, state[n]) for n, t in vit.state_dict().items())


class Counting(nn.Linear):
    """Has state that is no tensor."""

    count = 3

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_extra_state_of_modules_is_passed_on() -> None:
    model, x = Counting(4, 2), torch.randn(4, 4)
    with autopar.parallelize(model, 1, x) as pm:
        pm.load_state_dict(model.state_dict() | {"_extra_state": 5})
        model.load_state_dict(pm.state_dict())
    assert model.count == 5


# -- outputs of microbatches -----------------------------------------------------------------------------------------


def of_rows(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return output["rows"].square().mean()


@pytest.mark.parametrize("batch", [8, 7])
def test_outputs_of_microbatches_are_joined_as_the_model_would(batch: int) -> None:
    model, x = ManyOutputs(), torch.randn(batch, 8)
    expected = model(x)
    with in_threads(model, plan_by_hand(model, x, 2, ["second.linear"]), x, of_rows) as pm:
        actual = pm(x)
        assert pm.forward_backward(x, x, return_outputs=True).outputs["rows"].shape == (2 * batch, 4)
    assert expected["rows"].shape == (2 * batch, 4) and expected["table"].shape == (4, 3)
    for name in ("rows", "table", "penalty"):
        torch.testing.assert_close(actual[name], expected[name], msg=name)
    assert actual["number"] == 3


def test_an_output_that_cannot_be_joined_is_refused_before_anything_runs() -> None:
    model, x = ManyOutputs(largest=True), torch.randn(8, 8)
    with in_threads(model, plan_by_hand(model, x, 2, ["second.linear"]), x, of_rows) as pm:
        assert pm.forward_backward(x, x).loss > 0
        pm.zero_grad()
        with pytest.raises(
            UsageError,
            match=r"Output \['largest'\] of ManyOutputs is float32\[10\] for the batch of 8 and float32\[10\]",
        ):
            pm.forward_backward(x, x, return_outputs=True)
        assert pm.gradients() == {}
    with in_threads(model, plan_by_hand(model, x, 1, ["second.linear"]), x, of_rows) as pm:
        torch.testing.assert_close(pm(x), model(x))


# -- loss functions --------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_reported_and_the_run_goes_on() -> None:
    with autopar.parallelize(
        mlp(), 2, X, loss_fn=switched_loss, optimizer=SGD, plan=plan_by_hand(mlp(), X, 3, ["2.linear"])
    ) as pm:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert pm.forward_backward(X, Y).loss > 0
        with pytest.warns(
            NonFiniteLossWarning, match=r"loss of step 0 is nan: microbatches \[0, 1, 2\] of 3"
        ) as caught:
            assert pm.forward_backward(X, {"do": "nan"}).loss != pm.plan.microbatches
        assert caught[0].filename == __file__
        pm.zero_grad()
        norm = pm.train_step(X, Y).grad_norm
        assert norm is not None and 0 < norm < 100
        with pytest.raises(WorkerError) as error:
            pm.forward_backward(X, {"do": "raise"})
        message = str(error.value)
        assert "Rank 1 (stage 1) failed during forward_backward in action 1F0: KeyError: 'no such key'" in message
        assert 'target["no such key"]' in message and "All other ranks were ended" in message
        with pytest.raises(UsageError, match=r"workers are gone: Rank 1.*KeyError.*parallelize again"):
            pm.train_step(X, Y)


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("vector", r"one element, the mean loss .* it returned a tensor of shape \[2\].*\.mean\(\)"),
        ("float", "it returned float"),
        ("detached", "The loss has no gradient: loss_fn detached it"),
    ],
)
def test_what_a_loss_function_must_return(do: str, message: str) -> None:
    with autopar.parallelize(mlp(), 1, X, loss_fn=switched_loss, plan=plan_by_hand(mlp(), X, 3, [])) as pm:
        with pytest.raises(UsageError, match=message) as error:
            pm.forward_backward(X, {"do": do})
        assert error.value.__notes__ == ["autopar: rank 0 (stage 0), in action 0F0"]


def test_a_loss_function_that_raises_keeps_its_type_on_one_device() -> None:
    with autopar.parallelize(mlp(), 1, X, loss_fn=switched_loss, plan=plan_by_hand(mlp(), X, 3, [])) as pm:
        with pytest.raises(KeyError, match="no such key") as error:
            pm.forward_backward(X, {"do": "raise"})
        assert error.value.__notes__ == ["autopar: rank 0 (stage 0), in action 0F0"]


# -- the call of parallelize -----------------------------------------------------------------------------------------


def test_arguments_of_parallelize() -> None:
    plan = plan_by_hand(mlp(), X, 3, ["2.linear"])
    devices: Any
    arguments: Any
    for devices, arguments, message in (
        (2, {"microbatchs": 3}, r"Unknown argument 'microbatchs'\. Did you mean microbatches\?"),
        (0, {}, "devices=0 must be a whole number of at least 1"),
        (-2, {"plan": plan}, "devices=-2 must be a whole number of at least 1"),
        (2.0, {}, r"devices=2\.0 must be a whole number"),
        (2, {"microbatches": 0}, "microbatches=0 must be a whole number of at least 1"),
        (2, {"schedule": "1f1b", "chunks": 2}, "chunks=2 with schedule='1f1b', under which each rank has 1"),
        (2, {"tp": 3}, "tp=3 needs a multiple of 3 devices, not 2"),
        (2, {"backend": "mpi"}, "backend='mpi' is unknown"),
        (2, {"batch_size": 5}, "batch_size=5, but the example inputs hold 6 samples"),
        (
            3,
            {"plan": plan},
            r"The plan is for 2 devices, parallelize was asked for 3\. Use devices=2 \(--devices 2\)",
        ),
        (2, {"plan": plan, "microbatches": 2}, "Both plan= and microbatches= are given"),
    ):
        with pytest.raises(UsageError, match=message):
            autopar.parallelize(mlp(), devices, X, **arguments)
    with pytest.raises(UsageError, match="meta device"):
        autopar.parallelize(mlp().to("meta"), 2, X)
    with pytest.raises(UsageError, match="Cannot derive the inputs of Sequential"):
        autopar.parallelize(mlp(), 2)


def test_plans_that_do_not_fit() -> None:
    plan = plan_by_hand(mlp(), X, 3, ["2.linear"])
    wider = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    with pytest.raises(
        PlanError, match=r"another model: field model\.fingerprint is .* 212 parameters.* 420 parameters"
    ):
        autopar.parallelize(wider, 2, X, plan=plan)
    gap = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], first="0.linear")))
    with pytest.raises(PlanError, match=r"stages\.1\.first"):
        autopar.parallelize(mlp(), 2, X, plan=gap)
    unknown = replace(plan, stages=(replace(plan.stages[0], last="1.relu6"), plan.stages[1]))
    with pytest.raises(PlanError, match=r"stages\.0\.last: the model has no operation '1\.relu6'"):
        autopar.parallelize(mlp(), 2, X, plan=unknown)
    with pytest.raises(PlanError, match=r"field stages: has 1 entries, mesh\.pp × chunks asks for 2"):
        autopar.parallelize(mlp(), 2, X, plan=replace(plan, stages=plan.stages[:1]))


@pytest.mark.parametrize("devices", [1, 2])
def test_calls_after_close(devices: int) -> None:
    pm = autopar.parallelize(mlp(), devices, X, plan=plan_by_hand(mlp(), X, 3, ["2.linear"][: devices - 1]))
    pm.close()
    pm.close()
    for call in (lambda: pm(X), lambda: pm.forward_backward(X, Y), pm.state_dict, pm.gradients):
        with pytest.raises(UsageError, match=r"close.*parallelize again"):
            call()


def test_tensors_inside_of_compiled_stages_are_not_counted_on_cpu() -> None:
    with autopar.parallelize(
        mlp(),
        1,
        X,
        plan=plan_by_hand(mlp(), X, 3, []),
        optimizer=torch.optim.SGD,
        loss_fn=F.cross_entropy,
        compile=True,
    ) as pm:
        with pytest.raises(UsageError, match=r"cannot be counted on CPU\. Pass compile=False"):
            pm.measure_memory(X, Y)
        assert pm.state_dict().keys() == mlp().state_dict().keys()  # the model goes on
