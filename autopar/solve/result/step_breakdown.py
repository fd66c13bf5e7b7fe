"""Breakdown of a step's seconds, and the sentences made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from autopar.ir.mesh import Mesh
from autopar.ir.units import TIME, percent, plural, text

# The least share of a step that is worth a word, and the least relative gain of lifting the memory limit that makes
# memory what bounds a plan.
NOTABLE = 0.01


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds of a step by activity; they sum to the step.

    ``recompute_seconds`` are forwards run again in a backward, ``bubble_seconds`` waiting for other stages,
    ``transfer_seconds`` waiting that free transfers would save; the bubble includes it where the two are not separated.
    """

    compute_seconds: float
    recompute_seconds: float
    collective_seconds: float
    transfer_seconds: float
    bubble_seconds: float
    reduce_seconds: float
    optimizer_seconds: float

    @property
    def seconds(self) -> float:
        return sum(self.by_name.values())

    @property
    def pipeline_seconds(self) -> float:
        """The step without exposed reduction and optimizer."""
        return self.seconds - self.reduce_seconds - self.optimizer_seconds

    @property
    def bubble_fraction(self) -> float:
        """Share of the pipeline that a rank waits for other stages."""
        return self.bubble_seconds / self.pipeline_seconds if self.pipeline_seconds else 0.0

    @property
    def by_name(self) -> Mapping[str, float]:
        """Seconds by the words that are printed."""
        return {
            "compute": self.compute_seconds,
            "recomputation": self.recompute_seconds,
            "collectives": self.collective_seconds,
            "transfers": self.transfer_seconds,
            "bubble": self.bubble_seconds,
            "reduction": self.reduce_seconds,
            "optimizer": self.optimizer_seconds,
        }


def mean(parts: Sequence[StepBreakdown]) -> StepBreakdown:
    """Mean breakdown over ranks."""
    return StepBreakdown(*(sum(getattr(p, f.name) for p in parts) / len(parts) for f in fields(StepBreakdown)))


@dataclass(frozen=True)
class Slowest:
    """Slowest stage: its description, its excess over the mean, and the share of its time in transfers after it."""

    where: str
    over: float
    transfer_share: float


def bound_text(
    spent: StepBreakdown, slowest: Slowest, mesh: Mesh, stages: int, microbatches: int, waits_for_ports: bool
) -> str:
    """Sentence that names what bounds a step.

    Args:
        spent: of the mean rank.
        waits_for_ports: the pipeline takes as long as a port between nodes is in use.
    """
    where, parts = slowest.where, spent.by_name
    largest = max(parts, key=lambda name: parts[name])
    if waits_for_ports:
        what = f"ports between nodes, in use until the pipeline ends; compute of {where}"
    elif slowest.transfer_share > 0.5 or largest == "transfers":
        what = f"transfers behind {where}, {100 * slowest.transfer_share:.0f} % of its time"
    elif largest == "reduction":
        what = f"reduction of gradients over {mesh.dp} replicas; compute of {where}"
    elif largest == "optimizer":
        what = f"optimizer, {percent(spent.optimizer_seconds / spent.seconds, 0)} of the step; compute of {where}"
    elif largest == "collectives":
        whose = f"{mesh.tp} tensor-parallel ranks" if mesh.tp > 1 else f"{mesh.dp} replicas with sharded parameters"
        what = f"collectives of {whose}; compute of {where}"
    elif spent.bubble_fraction > 0.5:
        what = f"bubble of {stages} stages with {plural(microbatches, 'microbatch', 'es')}; compute of {where}"
    else:
        what = f"compute of {where}"
    if stages > 1:
        what += f", {100 * slowest.over:.1f} % over the mean; bubble {percent(spent.bubble_fraction, 0)}"
    for name in ("recomputation", "collectives", "transfers", "reduction"):
        if parts[name] > NOTABLE * spent.seconds:
            what += f"; {name} {percent(parts[name] / spent.seconds, 0)} of the step"
    return what


def memory_text(mesh: Mesh, chunks: int, peak_bytes: Sequence[int], free_seconds: float, what: str) -> str:
    """Sentence that names the fullest stage, or its rank if it has several, before ``what`` bounds the step otherwise.

    Args:
        peak_bytes: peak memory of each pipeline position.
        free_seconds: the step without the memory limit.
        what: result of `bound_text`.
    """
    fullest = max(range(mesh.pp), key=peak_bytes.__getitem__)
    whose = f"rank {mesh.ranks(fullest)[0]}" if chunks > 1 else f"stage {fullest}"
    return f"memory of {whose}, without whose limit the step would take {free_seconds * 1e3:,.1f} ms; then {what}"


def excess_text(breakdown: StepBreakdown, chosen: StepBreakdown) -> str:
    """Where a step spends its additional time, in a few words; empty if it is not longer."""
    mine, other = breakdown.by_name, chosen.by_name
    excess = {name: mine[name] - other[name] for name in mine}
    ranked = sorted((name for name in excess if excess[name] > 0), key=lambda name: -excess[name])
    said = [name for name in ranked[:2] if excess[name] >= excess[ranked[0]] / 2]
    if breakdown.seconds <= chosen.seconds or not said:
        return ""
    words = {
        "compute": f"compute {text(excess['compute'], TIME)} more",
        "bubble": f"bubble {percent(breakdown.bubble_fraction, 0)}",
        "reduction": f"reduction {text(mine['reduction'], TIME)} exposed",
    }
    return ", ".join(words.get(name, f"{name} {text(mine[name], TIME)}") for name in said)
