"""Printed bounds over shardings, against the step of every sharding of small models, and of some of larger ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import timm
import torch
from support.effort import only
from support.models import tiny_vit
from torch import nn

import autopar
from autopar.api.options import Options
from autopar.api.planning.costs import PlanCosts
from autopar.api.planning.plan import PlanRequest, lower_example, model_info
from autopar.api.planning.refine import refine
from autopar.cost.hardware.load import load_hardware
from autopar.ir.plan import Plan
from autopar.ir.tensor_axes import mesh_axes
from autopar.solve.cuts.step_time import Decision, Setting, step_time
from autopar.solve.search import search
from autopar.solve.shardings.variables import agrees
from autopar.solve.space.candidates import Candidate
from autopar.trace.call import as_call

ROUNDING = 1e-9
TRIED = 20  # shardings of a model that has too many to try all


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "two layers": (two_layers, (8, 256)),
    "vit": (lambda: tiny_vit(depth=2, embed_dim=64, num_heads=4), (8, 3, 32, 32)),
    "vit of 3 heads": (lambda: tiny_vit(depth=1), (8, 3, 32, 32)),
    # Its norms and layers read elements that lie apart, unless a collective lays them out anew.
    "convnext": (lambda: timm.create_model("convnext_base", depths=(1, 1, 2, 1)), (16, 3, 224, 224)),
    "resnet18": (lambda: timm.create_model("resnet18"), (16, 3, 64, 64)),
    "mixer": (lambda: timm.create_model("mixer_s32_224", img_size=64), (8, 3, 64, 64)),
}


MESHES: tuple[tuple[int, dict[str, int], str], ...] = (
    (2, {"tp": 2, "pp": 1}, "h200-nvlink"),
    (4, {"tp": 4, "pp": 1}, "rtx4090-pcie"),
    (4, {"tp": 2, "dp": 2}, "a100-nvlink"),
    (4, {"tp": 2, "pp": 2, "microbatches": 2}, "h200-nvlink"),
    (2, {"tp": 2}, "cpu"),
)


@dataclass(frozen=True)
class Planned:
    """A plan with tensor parallelism, and how other shardings of it are priced."""

    plan: Plan
    setting: Setting
    costs: PlanCosts
    decision: Decision
    candidates: Sequence[Candidate]

    def shardings(self) -> Iterator[tuple[int, ...]]:
        """All shardings if there are few; else some that change part of the chosen one, or are drawn at random."""
        graph = self.costs.strategy_graph(self.decision.problem.tensor_axes, self.decision.size)
        sizes = [len(group.strategies) for group in graph.groups]
        if all(size <= 8 for size in sizes) and len(sizes) <= 4:
            yield from (index for index in product(*map(range, sizes)) if agrees(graph, index))
            return
        draw, chosen, number = random.Random(0), self.decision.priced.strategy_index, 0
        while number < TRIED:
            share = draw.choice((1 / len(sizes), 0.1, 0.5, 1.0))
            index = tuple(draw.randrange(n) if draw.random() < share else k for n, k in zip(sizes, chosen))
            if agrees(graph, index):
                number += 1
                yield index

    def seconds(self, index: tuple[int, ...]) -> float:
        """Step of the decision's mesh and cuts under another sharding."""
        problem = self.decision.problem
        priced = self.costs.priced_strategies(index, problem.tensor_axes, problem.replicas, self.decision.size)
        return step_time(self.setting, replace(problem, cost=priced.cost), self.decision.stage_of).seconds


def planned(name: str, devices: int, hardware_name: str, **asked: int) -> Planned:
    make, shape = MODELS[name]
    with torch.device("meta"):
        model = make()
    options = Options.of({"cost": "analytic", "precision": "bf16", "hardware": hardware_name, **asked})
    request = PlanRequest(model, as_call(model, torch.empty(shape, device="meta")), devices, options, name)
    graph, hardware = lower_example(request), load_hardware(hardware_name)
    hardware = hardware.with_mode(options.execution_mode(hardware.device_type))
    costs, info, constraints = PlanCosts(graph, hardware), model_info(request, graph), request.constraints()
    heard: list[tuple[Sequence[Candidate], Decision]] = []
    plan = search(
        costs, graph, hardware, constraints, info, partial(refine, costs), lambda *told: heard.append(told)
    )  # fmt: skip
    return Planned(plan, Setting(graph, hardware, info, constraints, costs), costs, heard[0][1], heard[0][0])


@pytest.mark.parametrize(
    ("name", "devices", "mesh", "hardware"),
    only([("convnext", *MESHES[0]), ("two layers", *MESHES[3])], [(name, *mesh) for name in MODELS for mesh in MESHES]),
)
def test_no_sharding_is_below_the_printed_bound(name: str, devices: int, mesh: dict[str, int], hardware: str) -> None:
    found = planned(name, devices, hardware, **mesh)
    assert found.plan.solver.method.startswith("shardings")
    least = min(map(found.seconds, found.shardings()))
    printed = found.plan.prediction.step_seconds * (1 - found.plan.solver.gap)
    assert 0 < printed <= least * (1 + ROUNDING)
    # No bound is printed above the plan's step. This is the one before that.
    bound = refine(found.costs, found.decision).bound_seconds
    assert bound is not None and bound <= min(least, found.plan.prediction.step_seconds) * (1 + ROUNDING)


@pytest.mark.parametrize("name", only(["two layers"], MODELS))
def test_no_plan_of_another_mesh_is_below_the_printed_bound(name: str) -> None:
    found = planned(name, 4, "h200-nvlink")
    others, mesh = found.plan.solver.other_meshes, found.plan.mesh
    assert others is not None and others.bound_seconds is not None
    steps = [c.seconds for c in found.candidates if c.point.mesh != mesh]
    assert 0 < others.bound_seconds <= min(steps) * (1 + ROUNDING)


@pytest.mark.parametrize("name", only(("vit", "resnet18"), MODELS))
def test_the_floor_from_other_batch_sizes_is_no_higher_than_the_bound(name: str) -> None:
    make, shape = MODELS[name]
    model = make().to("meta")
    request = PlanRequest(model, as_call(model, torch.empty(shape, device="meta")), 2, Options(), name)
    graph, sizes = lower_example(request), (1, 2, 4, 8, 16, 64)
    for order in (sizes, sizes[::-1]):
        costs = PlanCosts(graph, load_hardware("h200-nvlink"))
        for size in order:
            floor = costs.floor_seconds(mesh_axes((2,)), size)
            assert floor <= costs.bound_seconds(mesh_axes((2,)), size) * (1 + ROUNDING)
            assert costs.floor_seconds(mesh_axes((2,)), size) == costs.bound_seconds(mesh_axes((2,)), size)


class Centred(nn.Module):
    """Log-probabilities of a layer times the probabilities of another one, whose running mean is taken off."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = two_layers(), two_layers()
        self.mean = nn.Buffer(torch.zeros(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = self.teacher(x)
            targets = (logits - self.mean).softmax(1)
            self.mean.lerp_(logits.mean(0), 0.1)
        return targets * self.student(x).log_softmax(1)


def test_a_sharding_may_join_other_operations_to_an_update_than_the_next() -> None:
    plan = autopar.plan(Centred(), 2, torch.randn(8, 256), tp=2, microbatches=1, hardware="cpu-generic")
    assert plan.mesh.tp == 2
