"""A report of a plan by hand with everything that reports show, and a bench of it."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Alternative, BlockCost, BlockSharding, Collective
from autopar.schedule.timeline import Span
from autopar.tools.bench.result import BenchResult
from autopar.tools.bench.row import BenchRow, PipelineResult
from autopar.tools.bench.timeline import MeasuredTimeline
from autopar.tools.simulate.step import simulate_plan
from support.explained_plans import GIB, by_hand


def full_plan(name: str = "toy_vit") -> Plan:
    """Pipeline of two stages with blocks, alternatives and a sharded block; ``name`` stands in every text."""
    plan = by_hand([(1.0, 2.0), (1.0, 2.5)], microbatches=4, peak_gib=5.0)
    blocks = [(f"{name}.0", 0, 0.4, 1.0), (f"{name}.1", 0, 0.6, 1.0), (f"{name}.2", 1, 1.0, 2.5)]
    return replace(
        plan,
        model=replace(plan.model, name=name, kwargs={"depth": name}),
        block_costs=tuple(BlockCost(block, s, 1_000_000, f, b) for block, s, f, b in blocks),
        blocks=(
            BlockSharding(f"{name}.*", 3, {"mlp": f"rows of {name} / 2"},
                          (Collective("op", f"all-reduce of {name}", "forward", 2**20, 1e-3),)),
        ),
        alternatives=(
            Alternative(f"other {name}", 1.1 * plan.prediction.step_seconds, f"bubble of {name}", None, 3 * GIB),
            Alternative("one device", None, f"does not fit {name}"),
        ),
        bound_by=f"compute of {name}",
        hardware=replace(plan.hardware, device=f"GPU {name}", link=name),
    )  # fmt: skip


def bench_of(plan: Plan, slower: float = 1.2, timeline: bool = True, **changes: object) -> BenchResult:
    """Bench in which the plan takes so many times as long as predicted."""
    step = simulate_plan(plan)
    spans = tuple(
        Span(rank, s.action, slower * s.start_seconds, slower * s.end_seconds)
        for position in step.positions
        for rank in position.ranks
        for s in position.spans
    )
    ranks, seconds = plan.mesh.devices, slower * step.step_seconds
    measured = MeasuredTimeline(spans, (0.0,) * ranks, (seconds,) * ranks)
    peaks = plan.prediction.peak_bytes
    pipeline = PipelineResult(
        plan.decision, 0.1, 0.2, 0.9 * seconds, step.step_seconds, peaks, timeline=measured if timeline else None
    )
    row = BenchRow("autopar", "autopar", plan.model.name, "the plan", ranks, peak_bytes=peaks, pipeline=pipeline)
    row = row.with_seconds((seconds,), plan.batch, 1e9)
    result = BenchResult(
        model=plan.model.name, model_kwargs={}, shape=(plan.batch, 3, 32, 32), devices=ranks, precision="fp32",
        channels_last=False, compiled=False, plan="pp 2, 1f1b, 4 microbatches of 16", flops_per_image=1e9, warmup=1,
        steps=1, seed=0, memory="peak of the allocator", machine="two toys", torch="2", autopar="0", commit=None,
        command="autopar bench toy_vit --devices 2", rows=(row,),
    )  # fmt: skip
    return replace(result, **changes)  # type: ignore[arg-type]
