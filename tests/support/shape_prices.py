"""Prices of stages that have tensor-parallel ranks and replicas of their own.

A stage of tp × dp ranks divides a microbatch of the whole batch among its dp replicas. It is priced as the planner
prices a stage of a uniform mesh with these tp and dp, at the samples of its fullest replica.

Error: optimistic. Replicas that fill several nodes are priced as if they began on a node's first rank. Tensor-parallel
ranks get activations from another stage without a gather. A weight that several groups read belongs to the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.cost_graph import CostGraph
from autopar.ir.plan_parts import ONE_REPLICA, Replicas, ZeroStage
from autopar.ir.tensor_axes import mesh_axes
from autopar.solve.cuts.step_time import Setting

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TENSOR = (1, 2, 4, 8)  # tensor-parallel ranks of a stage
PASSES = ("forward_seconds", "backward_seconds", "wgrad_seconds")
UPDATES = ("optimizer_seconds", "reduce_seconds", "gather_seconds", "contention_seconds", "num_buckets")


@dataclass(frozen=True)
class Shape:
    """Tensor-parallel ranks and replicas of a stage."""

    tp: int
    dp: int

    @property
    def devices(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        sizes = [f"{axis} {size}" for axis, size in (("tp", self.tp), ("dp", self.dp)) if size > 1]
        return " × ".join(sizes) or "dp 1"


@dataclass(frozen=True)
class Prices:
    """Sums over the units before each unit, for every shape under one number of microbatches.

    A unit is a group, and the groups after it up to the next one that all shapes have: small samples merge groups.

    Args:
        passes: seconds of a microbatch [shape, `PASSES`, unit].
        updates: once a step, without ZeRO and with ZeRO-1 [shape, ZeRO stage, `UPDATES`, unit].
        names: of the units' first groups.
        unit_of: unit of each group of the model on one device.
        crossing: bytes of a whole microbatch that cross a cut before each unit.
    """

    shapes: tuple[Shape, ...]
    passes: Floats
    updates: Floats
    names: tuple[str, ...]
    unit_of: tuple[int, ...]
    crossing: Floats

    def at(self, sums: Floats, index: Ints, cuts: Ints) -> Floats:
        """Sums of every stage's units.

        Args:
            index: shape of each stage [pipeline, stage].
            cuts: first unit of each stage, and the number of units [pipeline, stage + 1].
        """
        last = np.moveaxis(sums, -1, 1)
        return last[index, cuts[:, 1:]] - last[index, cuts[:, :-1]]


def shape_prices(setting: Setting, microbatches: int) -> Prices:
    """Prices of every shape that has enough samples of a microbatch."""
    costs = {
        shape: [plain, shared]
        for shape in shapes_of(setting, microbatches)
        if (plain := stage_costs(setting, shape, microbatches, 0))
        and (shared := stage_costs(setting, shape, microbatches, 1))
    }
    whole = whole_model(setting, microbatches)
    everywhere = set.intersection(*({group.name for group in plain.groups} for plain, _ in costs.values()))
    names = [group.name for group in whole.groups if group.name in everywhere]
    unit_of = units(whole, names)
    crossing = dict(zip(unit_of[: whole.loss], whole.cut_bytes))  # of a unit's last group
    return Prices(
        shapes=tuple(costs),
        passes=np.stack([pass_sums(plain, names) for plain, _ in costs.values()]),
        updates=np.stack([[update_sums(cost, names) for cost in both] for both in costs.values()]),
        names=tuple(names),
        unit_of=unit_of,
        crossing=np.array([0.0, *(crossing.get(unit, 0) for unit in range(len(names)))]),
    )


def shapes_of(setting: Setting, microbatches: int) -> Iterator[Shape]:
    """Shapes of fewer than all devices; with tensor parallelism only with replicas of a power of two."""
    asked, samples = setting.constraints, setting.constraints.batch // microbatches
    for devices in range(1, asked.devices):
        for tp in TENSOR:
            dp = devices // tp
            if devices % tp == 0 and dp * asked.least_samples <= samples and (tp == 1 or not dp & (dp - 1)):
                yield Shape(tp, dp)


def stage_costs(setting: Setting, shape: Shape, microbatches: int, zero: ZeroStage) -> CostGraph | None:
    """The model as a rank of a shape runs it; None where the fastest sharding splits nothing, so that every group is
    faster unsplit."""
    size, replicas = -(-setting.constraints.batch // microbatches // shape.dp), Replicas(shape.dp, zero)
    found = setting.costs.priced(mesh_axes((shape.tp,)), replicas, size, microbatches, 0)
    return None if found is None or (shape.tp > 1 and not found.strategies) else found.cost


def whole_model(setting: Setting, microbatches: int) -> CostGraph:
    """The model with a whole microbatch on one device, for the bytes of messages."""
    found = setting.costs.priced((), ONE_REPLICA, setting.constraints.batch // microbatches, microbatches, 0)
    assert found is not None, "one device has a price"
    return found.cost


def units(cost: CostGraph, names: Sequence[str]) -> tuple[int, ...]:
    """Unit of each group: the number of the last group so far that has one of the names."""
    numbers, found, unit = {name: number for number, name in enumerate(names)}, list[int](), 0
    for group in cost.groups:
        unit = max(unit, numbers.get(group.name, 0))
        found.append(unit)
    return tuple(found)


def pass_sums(cost: CostGraph, names: Sequence[str]) -> Floats:
    """Sums of the groups' `PASSES` over the units before each unit and before the end [field, unit]."""
    found = np.zeros((len(PASSES), len(names) + 1))
    for unit, group in zip(units(cost, names), cost.groups):
        found[:, unit + 1] += [getattr(group, name) for name in PASSES]
    return found.cumsum(axis=1)


def update_sums(cost: CostGraph, names: Sequence[str]) -> Floats:
    """As `pass_sums`, but of the `UPDATES` of the groups' weights."""
    unit_of, found = units(cost, names), np.zeros((len(UPDATES), len(names) + 1))
    for weight in cost.weights:
        found[:, unit_of[min(weight.groups)] + 1] += [getattr(weight, name) for name in UPDATES]
    return found.cumsum(axis=1)


def update_seconds(passes: Floats, updates: Floats, is_split: bool) -> Floats:
    """Exposed exchange between replicas and optimizer of ranks at each ZeRO stage, as in
    `autopar.solve.cuts.evaluate.RankCost`.

    Args:
        passes: of the ranks' stages together [pipeline, position, `PASSES`].
        updates: likewise [pipeline, position, ZeRO stage, `UPDATES`].
        is_split: whether backwards leave the gradients of weights for later.
    """
    forward, backward, wgrad = np.moveaxis(passes[..., None, :], -1, 0)
    optimizer, reduce, gather, contention, buckets = np.moveaxis(updates, -1, 0)
    hiding, buckets = (wgrad if is_split else backward), np.maximum(1.0, buckets)
    exposed = np.maximum(reduce - hiding, reduce / buckets) + np.maximum(gather - forward, gather / buckets)
    return exposed + contention + optimizer
