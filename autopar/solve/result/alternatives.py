"""The plans that were considered and not chosen: other meshes, other microbatches and cuts, one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.mesh import Mesh
from autopar.ir.plan_parts import ONE_DEVICE, ONE_REPLICA, Alternative, Balance, OtherMeshes
from autopar.ir.tensor_axes import TensorAxes
from autopar.ir.units import plural
from autopar.solve.cuts.evaluate import peak_bytes, stage_costs
from autopar.solve.cuts.merge import merge
from autopar.solve.cuts.step_time import Decision, Setting, step_time
from autopar.solve.result.reasons import parts, why_slower
from autopar.solve.shardings.solve import least_passes
from autopar.solve.space.candidates import Candidate, evaluate, evaluate_cuts, look_up, without_limit
from autopar.solve.space.constraints import microbatch_candidates
from autopar.solve.space.lower_bounds import LowerBounds
from autopar.solve.space.points import (
    Pipeline,
    Point,
    enumerate_points,
    microbatch_samples,
    neighbours,
    point_of,
    points_with_other_schedules,
)

MAX_MESHES = 8
BALANCES: Mapping[Balance, str] = {
    "time": "equal time", "uniform": "uniform cuts", "params": "equal parameters", "flops": "equal FLOPs"
}  # fmt: skip
MAX_BALANCES = 2


def alternatives(
    setting: Setting,
    bounds: LowerBounds,
    by_mesh: Mapping[Mesh, list[Candidate]],
    refused: Mapping[Mesh, str],
    decision: Decision,
) -> tuple[Alternative, ...]:
    """The best plan found on every other mesh, fastest first; of the same mesh other settings and cuts, and no
    recomputation; a single device."""
    problem, batch = decision.problem, setting.constraints.batch
    chosen = parts(decision, step_time(setting, problem, decision.stage_of), batch)

    def listed(label: str, candidate: Candidate) -> Alternative:
        why = why_slower(candidate, chosen, batch)
        if candidate.step is None or candidate.stage_of is None:
            return Alternative(label, None, why)
        peak = peak_bytes(candidate.problem, candidate.stage_of)
        return Alternative(label, candidate.seconds, why, peak_bytes=peak)

    meshes = {mesh: min(found, key=lambda c: c.seconds) for mesh, found in by_mesh.items() if found}
    others = sorted((c for mesh, c in meshes.items() if mesh != problem.mesh), key=lambda c: c.seconds)
    rows = [listed(mesh_label(c.point), c) for c in others[:MAX_MESHES]]
    rows += [Alternative(str(mesh), None, why) for mesh, why in list(refused.items())[: MAX_MESHES - len(rows)]]
    near = look_up(setting, bounds, by_mesh[problem.mesh], neighbours(setting, point_of(decision)))
    rows += [replace(listed(point_label(c.point), c), microbatches=c.point.microbatches) for c in near]
    rows += [listed(str(c.point.pipeline), c) for c in other_pipelines(setting, bounds, by_mesh, decision)]
    rows += [listed("no recomputation", c) for c in without_recomputation(setting, decision)]
    rows += [listed(BALANCES[c.problem.balance], c) for c in other_balances(setting, decision)]
    if problem.mesh.devices > 1:
        alone = one_device(setting, bounds)
        rows.append(replace(listed(ONE_DEVICE, alone), note=alone.note))
    return tuple(rows)


def other_meshes(bounds: LowerBounds, allowed: Sequence[Mesh], decision: Decision) -> OtherMeshes | None:
    """Proof about the allowed meshes but the decision's; None if there are none, or if time is not what is balanced."""
    mesh = decision.problem.mesh
    others = [proven_seconds(bounds, other) for other in allowed if other != mesh]
    if not others or decision.problem.balance != "time":
        return None
    step = step_time(bounds.setting, decision.problem, decision.stage_of).seconds
    num_slower = sum(bound is not None and bound >= step for bound in others)
    known = [bound for bound in others if bound is not None]
    return OtherMeshes(num_slower, len(others) - num_slower, min(known) if len(known) == len(others) else None)


def proven_seconds(bounds: LowerBounds, mesh: Mesh) -> float | None:
    """A step that no plan of a mesh undercuts, with the microbatches and schedules that are searched; None if the
    search proved nothing for any microbatch of this tp. Communication between replicas and stages and the update count
    as free.

    Error: over the strategies that are listed for the microbatches of `microbatch_bound`.
    """
    setting, steps = bounds.setting, list[float]()
    for point in enumerate_points(setting, mesh):
        size = microbatch_samples(setting, point)
        work = microbatch_bound(bounds, mesh.tensor_axes, size)
        if work is None:
            return None
        microbatches = setting.constraints.batch / mesh.dp / size
        steps.append(work * least_passes(microbatches, mesh.pp, point.pipeline.chunks))
    return min(steps)


def microbatch_bound(bounds: LowerBounds, axes: TensorAxes, size: int) -> float | None:
    """Lower bound of a microbatch's time on all stages, from microbatches whose strategies were listed, if any. More
    samples take no less time, and no more for each sample."""
    costs = bounds.setting.costs
    if not axes:
        return costs.proven_seconds(axes, size)
    listed = (samples for known, samples in bounds.strategy_seconds if known == axes)
    return max((costs.proven_seconds(axes, samples) * min(1.0, size / samples) for samples in listed), default=None)


def mesh_label(point: Point) -> str:
    """``pp 2 × tp 1 × dp 2, v 2, m 8, ZeRO-1``: the mesh, stages a rank, microbatches, what replicas share."""
    chunks = f", v {point.pipeline.chunks}" if point.pipeline.chunks > 1 else ""
    zero = f", {point.replicas.zero_text}" if point.replicas.zero else ""
    return f"{point.mesh}{chunks}, m {point.microbatches:,}{zero}"


def point_label(point: Point) -> str:
    """``8 microbatches``, and whether the state is shared where there are replicas."""
    zero = f", {point.replicas.zero_text or 'no ZeRO-1'}" if point.replicas.dp > 1 else ""
    return plural(point.microbatches, "microbatch", "es") + zero


def other_pipelines(
    setting: Setting, bounds: LowerBounds, by_mesh: Mapping[Mesh, list[Candidate]], decision: Decision
) -> list[Candidate]:
    """Alternatives with other schedules: the fastest for each number of stages a rank, as far as the model has so many
    pieces; fastest first."""
    fastest: dict[int, Candidate] = {}
    points = points_with_other_schedules(setting, point_of(decision))
    for candidate in look_up(setting, bounds, by_mesh[decision.problem.mesh], points):
        if candidate.problem.stages > merge(candidate.problem).problem.cost.loss:
            continue
        known = fastest.setdefault(candidate.problem.chunks, candidate)
        if candidate.seconds < known.seconds:
            fastest[candidate.problem.chunks] = candidate
    return sorted(fastest.values(), key=lambda c: c.seconds)


def other_balances(setting: Setting, decision: Decision) -> list[Candidate]:
    """Cuts by another balance: they stand for those made by hand, which look at no limit, and are judged afterwards."""
    problem = decision.problem
    if problem.stages == 1:
        return []
    point = point_of(decision)
    limit_bytes = setting.constraints.capacity_bytes(setting.hardware)
    found = [
        evaluate_cuts(setting, point, decision.priced, replace(without_limit(problem), balance=balance), limit_bytes)
        for balance in BALANCES
        if balance != problem.balance
    ]
    return [c for c in found if c.stage_of != decision.stage_of][:MAX_BALANCES]


def without_recomputation(setting: Setting, decision: Decision) -> list[Candidate]:
    """Alternative without recomputation, if the decision has any; had it fitted, it would have been chosen."""
    problem = decision.problem
    if not any(c.recomputed_below for c in stage_costs(problem, decision.stage_of)):
        return []
    point, cost = point_of(decision), decision.priced.cost
    limit_bytes = setting.constraints.capacity_bytes(setting.hardware)
    return [evaluate_cuts(setting, point, decision.priced, replace(problem, cost=cost, recompute="none"), limit_bytes)]


def one_device(setting: Setting, bounds: LowerBounds) -> Candidate:
    """The fastest of a single device, or the one that needs least."""
    pipeline = Pipeline("gpipe" if setting.constraints.schedule == "gpipe" else "1f1b")
    candidates = microbatch_candidates(setting.constraints, 1)
    points = sorted((Point(1, 1, ONE_REPLICA, m, pipeline) for m in candidates), key=bounds.seconds)
    found: list[Candidate] = []
    for point in points:
        best = min((c.seconds for c in found), default=float("inf"))
        if (candidate := evaluate(setting, bounds, point, best)) is not None:
            found.append(candidate)
    return min(found, key=lambda c: (c.seconds, -c.point.microbatches))
