"""Split backwards change no number: bit equal to whole ones under the same cuts, and equal to one device."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import ADAMW
from support.effort import only
from support.handmade import even_firsts, in_a_v, in_threads, plan_by_hand
from support.models import ConvNet, Tied, TwoHeads, UNet, loss_of_some, main_loss, resnet18, tiny_vit
from support.parity import images, labels, outputs_agree, state_agrees, step_agrees, three_steps_of
from support.reference import Reference
from support.schedules import uniform_order
from torch import nn

import autopar
from autopar.codegen.fusions.split_backward import split_backward
from autopar.codegen.split import split
from autopar.errors import PlanError, UsageError
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import FIXED_CHUNKS, ListOrder, ScheduleName
from autopar.tools.parity.compare import EPSILON
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model

CAREFUL = functools.partial(torch.optim.AdamW, lr=1e-3, eps=EPSILON)


def searched(pp: int, chunks: int = 1) -> ListOrder:
    """Ranks keep one and a half times the activations of 1F1B."""
    return uniform_order(pp, chunks, (pp * chunks + pp * chunks // 2,) * pp)


def split_plans(whole: Plan) -> list[Plan]:
    """The plan with split backwards."""
    pp, chunks = whole.mesh.pp, whole.chunks
    plans = [replace(whole, schedule="searched", order=searched(pp, chunks))]
    return plans if chunks > 1 else [*plans, replace(whole, schedule="zb-h1")]


def steps(model: nn.Module, plan: Plan, x: Any, y: Any, loss_fn: Any, **recipe: Any) -> list[dict[str, torch.Tensor]]:
    """Loss, gradients and state after each of two updates, of two accumulated calls and of one step."""
    pm = in_threads(copy.deepcopy(model), plan, x, loss_fn, optimizer=CAREFUL, **recipe)
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        found.append({"loss": torch.tensor(pm.forward_backward(x, y).loss)} | pm.gradients())
    pm.optimizer_step()
    found.append(pm.state_dict())
    found.append({"loss": torch.tensor(pm.train_step(x, y).loss)} | pm.state_dict())
    return found


def assert_bit_equal(
    model: nn.Module, whole: Plan, plans: list[Plan], x: Any, y: Any, loss_fn: Any, **recipe: Any
) -> None:
    torch.manual_seed(0)
    expected = steps(model, whole, x, y, loss_fn, **recipe)
    for plan in plans:
        torch.manual_seed(0)
        for a, b in zip(steps(model, plan, x, y, loss_fn, **recipe), expected, strict=True):
            assert a.keys() == b.keys()
            assert not [name for name in a if not torch.equal(a[name], b[name])], plan.schedule


def frozen(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.1" not in name and "patch" not in name)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], Callable[[], torch.Tensor], Any]] = {
    "vit": (tiny_vit, lambda: images(6), lambda: labels(6), F.cross_entropy),
    "frozen": (lambda: frozen(tiny_vit()), lambda: images(6), lambda: labels(6), F.cross_entropy),
    "unet": (UNet, lambda: images(6, 8), lambda: torch.rand(6, 1, 8, 8), F.mse_loss),
    "batch norm": (resnet18, lambda: images(6), lambda: labels(6), F.cross_entropy),
    "convnet": (ConvNet, lambda: images(6), lambda: torch.randint(0, 4, (6,)), F.cross_entropy),
    "tied": (Tied, lambda: torch.randint(0, 32, (6, 5)), lambda: torch.randint(0, 32, (6,)), F.cross_entropy),
    "some outputs": (TwoHeads, lambda: torch.randn(6, 8), lambda: torch.tensor([1, 1, 0, 1, 2, 0]), loss_of_some),
    "one output": (TwoHeads, lambda: torch.randn(6, 8), lambda: torch.tensor([1, 1, 0, 1, 2, 0]), main_loss),
}


@pytest.mark.parametrize("name", only(["vit", "batch norm", "some outputs"], MODELS))
def test_models(name: str) -> None:
    torch.manual_seed(0)
    make, x, y, loss_fn = MODELS[name]
    model, x, y = make(), x(), y()
    plan = plan_by_hand(model, x, 3, even_firsts(model, x, 2))
    assert_bit_equal(model, plan, split_plans(plan), x, y, loss_fn)


# Of others some gradients are sums over stages, which other ranks add in another order.
@pytest.mark.parametrize("name", only(["vit"], [name for name in MODELS if name not in ("unet", "tied")]))
def test_models_in_a_v(name: str) -> None:
    torch.manual_seed(0)
    make, x, y, loss_fn = MODELS[name]
    model, x, y = make(), x(), y()
    plan = plan_by_hand(model, x, 3, even_firsts(model, x, 4), "interleaved", chunks=FIXED_CHUNKS["zb-v"])
    assert_bit_equal(model, plan, [in_a_v(plan)], x, y, loss_fn)


@pytest.mark.parametrize(
    "options",
    only(
        [{"precision": "bf16", "recompute": "all"}, {"chunks": 2}],
        [
            {"chunks": 2},
            {"chunks": 3, "pp": 2},
            {"pp": 4},
            {"precision": "bf16", "recompute": "all"},
            {"precision": "bf16-params"},
            {"precision": "fp16"},
            {"recompute": 1},
            {"dp": 2},
            {"dp": 2, "zero": 1, "precision": "bf16-params"},
            {"dp": 2, "reduce_dtype": "bfloat16"},
        ],
    ),
    ids=str,
)
def test_plans(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x, y, options = tiny_vit(depth=6), images(12), labels(12), dict(options)
    pp, recompute = options.pop("pp", 2), options.pop("recompute", "none")
    chunks: int = options.get("chunks", 1)
    schedule: ScheduleName = "interleaved" if chunks > 1 else "1f1b"
    plan = plan_by_hand(model, x, 3, even_firsts(model, x, pp * chunks), schedule, **options)
    plan = replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))
    assert_bit_equal(model, plan, split_plans(plan), x, y, F.cross_entropy, clip_grad_norm=0.5)


@pytest.mark.parametrize("schedule", only(["zb-h1", "zb-v"], ["zb-h1", "zb-v", "searched"]))
def test_any_number_of_microbatches_in_processes(schedule: ScheduleName, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = tiny_vit()
    chunks = FIXED_CHUNKS["zb-v"] if schedule == "zb-v" else 1
    plan = plan_by_hand(model, images(5), 5, even_firsts(model, images(5), 2 * chunks), schedule, chunks=chunks)
    plan = replace(plan, order=searched(2)) if schedule == "searched" else plan
    reference = Reference(model, F.cross_entropy, ADAMW)
    with autopar.parallelize(model, 2, images(5), optimizer=ADAMW, plan=plan) as pm:
        outputs_agree(pm, reference, images(5))
        for batch in (1, 3, 5):  # that many microbatches
            step_agrees(pm, reference, images(batch), labels(batch))
        step_agrees(pm, reference, images(9), labels(9), times=2)  # four microbatches of 2 and one of 1
        state_agrees(pm, reference, model)
        pm.save_checkpoint(tmp_path / "checkpoint")
    whole = plan_by_hand(model, images(5), 5, even_firsts(model, images(5), 2))
    with autopar.parallelize(model, 2, images(5), optimizer=ADAMW, plan=whole) as other:
        other.load_checkpoint(tmp_path / "checkpoint")
        step_agrees(other, reference, images(5), labels(5))
        state_agrees(other, reference, model)


@pytest.mark.full
def test_compiled() -> None:
    """GEMMs add to main grads as in whole backwards."""
    torch.manual_seed(0)
    model, x, y = tiny_vit(depth=2), images(6), labels(6)
    plan = plan_by_hand(model, x, 3, even_firsts(model, x, 2), precision="bf16-params")
    found = []
    for own in (plan, *split_plans(plan)):
        with autopar.parallelize(copy.deepcopy(model), 2, x, optimizer=CAREFUL, plan=own, compile=True) as pm:
            losses = [pm.train_step(x, y).loss for _ in range(2)]
            found.append((losses, pm.state_dict()))
    for losses, state in found[1:]:
        assert losses == found[0][0]
        assert not [name for name in state if not torch.equal(state[name], found[0][1][name])]


@pytest.mark.full
def test_tensor_parallelism_by_a_plan_that_was_searched_for() -> None:
    torch.manual_seed(0)
    model = tiny_vit(embed_dim=32, num_heads=4)
    x, y = images(8), labels(8)
    plan = autopar.plan(
        model, 4, x, hardware="cpu-generic", memory="64GiB", pp=2, tp=2, microbatches=4, schedule="searched", chunks=2
    )
    assert plan.schedule == "searched" and plan.order is not None and plan.strategies
    three_steps_of(plan, model, x, y, optimizer=CAREFUL)


def test_what_is_split() -> None:
    """Products of trained weights with one reader; norms, biases of linear layers and shared weights stay."""
    model = Tied()
    graph = lower_model(model, as_call(model, torch.randint(0, 32, (2, 5))), "train", "", "fp32")
    (program,) = (split_backward(p, compiled=False) for p in split(graph, dict.fromkeys(graph.values, 0), 1))
    assert {layer.weight for layer in program.deferred} == {f"layers.{i}.1.weight" for i in range(3)}
    assert program.arguments[-1] == program.deferred[-1].x_slot.name


def test_refusals() -> None:
    model, x = tiny_vit(), images(4)
    plan = plan_by_hand(model, x, 2, even_firsts(model, x, 2))
    for bad, words in (
        (replace(plan, schedule="searched"), "field order: is missing; a searched schedule is made from it"),
        (replace(plan, order=searched(2)), "field order: is not for 1f1b"),
        (replace(plan, schedule="searched", order=searched(3)), "field order.forward: is [1, 1, 1], must be 2 numbers"),
        (
            replace(plan, schedule="searched", order=replace(searched(2), max_in_flight=(1, 2))),
            "field order: keeps 1 activations, 2 chunks need as many on each rank",
        ),
        (replace(plan, schedule="zb-v"), "field chunks: is 1; under zb-v each rank has 2."),
        (replace(plan, schedule="zb-h1", zero=3), "zero is 3. From ZeRO-2 on gradients are reduced after every"),
    ):
        with pytest.raises(PlanError) as error:
            bad.validate()
        assert words in str(error.value)
    with pytest.raises(UsageError, match="schedule='zb-h1' splits backwards, and zero=2 reduces gradients after every"):
        autopar.plan(model, 4, x, pp=2, dp=2, zero=2, schedule="zb-h1")
    with pytest.raises(UsageError, match="schedule='searched' with pp=1, which is no pipeline"):
        autopar.plan(model, 2, x, pp=1, schedule="searched")
