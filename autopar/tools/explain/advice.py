"""The bound of a plan's step, and changes that would shorten it, both derived from the step's breakdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.microbatches import microbatch_sizes
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Alternative
from autopar.ir.table import NEARLY_FULL, ranks_text, stage_ends
from autopar.ir.units import BYTES, TIME, percent, plural, text
from autopar.solve.result.step_breakdown import NOTABLE, Slowest, bound_text, memory_text
from autopar.tools.explain.breakdown import Breakdown, Pipeline, Position, breakdown_of

WORTH_HELP = 0.1  # share of the step above which a part gets a suggestion
EDITED = 1e-6  # relative difference of two step times; unedited files agree to rounding


@dataclass(frozen=True)
class Suggestion:
    """A change that would shorten the step, and the step's seconds after it."""

    text: str
    step_seconds: float


@dataclass(frozen=True)
class Explanation:
    """Why a plan is as fast as it is. ``notes`` limit what the numbers mean."""

    headline: str
    breakdown: Breakdown
    suggestions: tuple[Suggestion, ...]
    notes: tuple[str, ...]


def explained(plan: Plan) -> Explanation:
    """Explanation of a plan, from its file alone."""
    breakdown = breakdown_of(plan)
    return Explanation(headline(plan, breakdown), breakdown, suggestions(plan, breakdown), notes(plan, breakdown))


def headline(plan: Plan, breakdown: Breakdown) -> str:
    """The plan's bound in words, with numbers.

    First the memory limit, if the planner recorded one; then the activity that takes the time; then nearly full memory.
    """
    pipeline = Pipeline.of(plan)
    times = [
        f + b + transfers_behind(pipeline, s)
        for s, (f, b) in enumerate(zip(pipeline.forward_seconds, pipeline.backward_seconds))
    ]
    slowest = max(range(len(times)), key=times.__getitem__)
    first, last = stage_ends(plan.stages)[slowest]
    where = f"stage {slowest} ({first} … {last})" if first != last else f"stage {slowest} ({first})"
    over = times[slowest] / (sum(times) / len(times)) - 1 if sum(times) else 0.0
    share = transfers_behind(pipeline, slowest) / times[slowest] if times[slowest] else 0.0
    waits = pipeline.seconds == pipeline.port_seconds > 0
    said = bound_text(
        breakdown.spent, Slowest(where, over, share), plan.mesh, len(plan.stages), plan.microbatches, waits
    )
    what = "; ".join([said, *nearly_full(breakdown)])
    if plan.seconds_without_limit is None or is_edited(plan, breakdown):
        return what
    peaks = [p.memory.peak_bytes for p in breakdown.positions]
    return memory_text(plan.mesh, plan.chunks, peaks, plan.seconds_without_limit, what)


def transfers_behind(pipeline: Pipeline, stage: int) -> float:
    """Seconds per microbatch of all transfers that cross the boundary after a stage."""
    return sum(t for (src, dst), t in pipeline.transfers.items() if min(src, dst) <= stage < max(src, dst))


def nearly_full(breakdown: Breakdown) -> Sequence[str]:
    """A clause about the fullest position and its largest part; empty if its memory is not nearly full."""
    fullest = max(breakdown.positions, key=lambda p: p.memory.share)
    memory = fullest.memory
    if memory.share <= NEARLY_FULL:
        return ()
    most = f", largest part {memory.largest}" if memory.largest else ""
    return (f"memory of {ranks_of(fullest)} {percent(memory.share, 0)} full ({text(memory.peak_bytes, BYTES)} of "
            f"{text(memory.capacity_bytes, BYTES)}{most})",)  # fmt: skip


def ranks_of(position: Position) -> str:
    """``rank 3`` or ``ranks 4–7``."""
    return f"rank{'s' if len(position.ranks) > 1 else ''} {ranks_text(position.ranks)}"


def is_edited(plan: Plan, breakdown: Breakdown) -> bool:
    """Whether the step computed from the stages differs from the plan's prediction."""
    return abs(breakdown.step_seconds / plan.prediction.step_seconds - 1) > EDITED


def notes(plan: Plan, breakdown: Breakdown) -> tuple[str, ...]:
    """Contradictions in the file, and whether the planner already rejected smaller microbatches."""
    found = []
    if is_edited(plan, breakdown):
        found.append(
            f"The file predicts a step of {text(plan.prediction.step_seconds, TIME)}, its stages' own times make "
            f"{text(breakdown.step_seconds, TIME)}: it was written or edited by hand. All numbers here are from the "
            "stages."
        )
    finer = finer_priced(plan)
    waits = breakdown.spent.bubble_seconds > WORTH_HELP * breakdown.step_seconds
    if waits and finer is not None and finer.step_seconds is not None and finer.step_seconds >= breakdown.step_seconds:
        found.append(f"Smaller microbatches would not help: {finer.label} take {text(finer.step_seconds, TIME)}.")
    return tuple(found)


def suggestions(plan: Plan, breakdown: Breakdown) -> tuple[Suggestion, ...]:
    """Changes that would shorten the step, shortest resulting step first.

    A change is suggested only for an activity above `WORTH_HELP`, and only if it saves more than `NOTABLE` of the step.
    """
    pipeline, spent, step = Pipeline.of(plan), breakdown.spent, breakdown.step_seconds
    end = step - pipeline.seconds
    found: list[Suggestion] = []
    if spent.bubble_seconds > WORTH_HELP * step:
        found += [*more_microbatches(plan, pipeline, end), *even_stages(pipeline, end)]
    if spent.transfer_seconds > WORTH_HELP * step:
        found.append(faster_link(plan, pipeline, end))
    if spent.recompute_seconds > WORTH_HELP * step:
        once = tuple(max(0.0, s.backward_seconds - s.recompute_seconds) for s in plan.stages)
        found.append(
            Suggestion("memory enough to keep all activations", replace(pipeline, backward_seconds=once).seconds + end)
        )
    if spent.reduce_seconds > WORTH_HELP * step:
        found.append(Suggestion("a reduction that backwards hide whole", step - plan.prediction.reduce_seconds))
    return tuple(sorted((h for h in found if h.step_seconds < (1 - NOTABLE) * step), key=lambda h: h.step_seconds))


def more_microbatches(plan: Plan, pipeline: Pipeline, end_seconds: float) -> Sequence[Suggestion]:
    """Twice as many microbatches of half the samples, at the planner's price if it priced them.

    Error: without that price, times scale with samples. Smaller kernels are less efficient and messages have a latency,
        so the step is longer.
    """
    sizes, size = finer_sizes(plan), largest_size(plan)
    if sizes[0] >= size:
        return ()
    count = f"{plural(len(sizes), 'microbatch', 'es')} instead of {len(pipeline.sizes)}"
    priced = finer_priced(plan)
    if priced is not None:
        return (Suggestion(f"{count}, as the planner priced it", priced.step_seconds),) if priced.step_seconds else ()
    finer = replace(pipeline, sizes=tuple(s / size for s in sizes))
    return (Suggestion(f"{count}, if a sample takes as long then", finer.seconds + end_seconds),)


def largest_size(plan: Plan) -> int:
    """Samples of the largest microbatch."""
    return microbatch_sizes(plan.batch // plan.mesh.dp, plan.microbatches)[0]


def finer_sizes(plan: Plan) -> Sequence[int]:
    """Samples of each microbatch when their number doubles."""
    local = plan.batch // plan.mesh.dp
    return microbatch_sizes(local, min(local, 2 * plan.microbatches))


def finer_priced(plan: Plan) -> Alternative | None:
    """The planner's alternative with as many microbatches as `finer_sizes`; None if there is none."""
    sizes = finer_sizes(plan)
    found = (a for a in plan.alternatives if a.microbatches == len(sizes))
    return next(found, None) if sizes[0] < largest_size(plan) else None


def even_stages(pipeline: Pipeline, end_seconds: float) -> Sequence[Suggestion]:
    """The suggestion that every stage takes the mean time; none for a single stage."""
    count = len(pipeline.forward_seconds)
    names = ("forward_seconds", "backward_seconds", "wgrad_seconds")
    even = replace(pipeline, **{name: (sum(getattr(pipeline, name)) / count,) * count for name in names})
    return (
        (Suggestion("an even split of the same work over the stages", even.seconds + end_seconds),) if count > 1 else ()
    )


def faster_link(plan: Plan, pipeline: Pipeline, end_seconds: float) -> Suggestion:
    """Free transfers between the pair of positions where they save most."""
    at = plan.placement.position
    hops: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for src, dst in pipeline.transfers:
        hops.setdefault((min(at(src), at(dst)), max(at(src), at(dst))), set()).add((src, dst))

    def after(hop: tuple[int, int]) -> tuple[float, float]:
        return pipeline.without(hops[hop]).seconds, -sum(pipeline.transfers[pair] for pair in hops[hop])

    low, high = hop = min(hops, key=after)
    sent = sum(m.num_bytes for m in plan.messages if (m.src, m.dst) in hops[hop])
    seconds = sum(pipeline.transfers[pair] for pair in hops[hop])
    between = f"ranks {ranks_text(plan.mesh.ranks(low))} and {ranks_text(plan.mesh.ranks(high))}"
    return Suggestion(
        f"free transfers between {between}, now {text(sent, BYTES)} in {text(seconds, TIME)} a microbatch",
        pipeline.without(hops[hop]).seconds + end_seconds,
    )
