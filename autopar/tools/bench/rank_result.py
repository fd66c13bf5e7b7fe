"""The result of one worker process of a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.runtime.engine.executor import ActionTiming
from autopar.runtime.spec import RankStats
from autopar.tools.bench.kernel_trace import ProfiledStep


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed.

    Args:
        kind: "expressible" if the baseline cannot run this at all, "usage" if a setting is wrong, "memory" if a GPU
            ran out of memory, "time" if the limit passed, "died" if the process ended without a word, else the
            exception's class.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class StepSpans:
    """The actions of all ranks in one step, and the host clock at each rank's first action."""

    spans: Mapping[int, tuple[ActionTiming, ...]]
    started_ns: Mapping[int, int]

    @staticmethod
    def of(stats: Mapping[int, RankStats]) -> StepSpans:
        return StepSpans({r: s.spans for r, s in stats.items()}, {r: s.started_ns for r, s in stats.items()})


@dataclass(frozen=True)
class RankResult:
    """One rank's measurements.

    Args:
        seconds: of each timed step.
        losses: this rank's share of the loss of each step in order, warm-up included.
        peak_bytes: peak memory over all steps: of the allocator on a GPU, growth of the process on CPU.
        step_ns: host clock before and after each inspected step, with an idle device. On CPU these are the timed steps.
        steps: spans of each inspected step, from rank 0 of baselines that run a plan.
        tensor_bytes: peak bytes in tensors by rank, for baselines that count them.
        profiled: kernels of each profiled step.
        failure: why there are no measurements.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    peak_bytes: int
    step_ns: tuple[tuple[int, int], ...] = ()
    steps: tuple[StepSpans, ...] = ()
    tensor_bytes: Mapping[int, int] = field(default_factory=dict)
    profiled: tuple[ProfiledStep, ...] = ()
    failure: RankFailure | None = None


def failed_result(kind: str, text: str) -> RankResult:
    """The result of a rank that failed."""
    return RankResult((), (), 0, failure=RankFailure(kind, text))
