"""What a contestant's process leaves behind, as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from autopar.runtime.engine.executor import ActionTiming
from autopar.runtime.spec import RankStats
from autopar.schedule.actions import Action


@dataclass(frozen=True)
class Failure:
    """Why a rank gave up.

    ``kind`` is "expressible" where it was never able to, "usage" where a setting is wrong, "memory" where a GPU's
    ran out, else the exception's class.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class StepSpans:
    """The actions of all ranks in one step, and when on the host's clock each rank's first one started."""

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
        losses: of all steps in order, warm-up included; this rank's shares.
        peak_bytes: most memory during all steps: of the allocator on a GPU, and on CPU what the process grew by.
        whole_ns: host clock around each inspected step, the device idle at both; on CPU they are the timed ones.
        steps: spans of each inspected step, from rank 0 of contestants that have them.
        tensor_bytes: most bytes in tensors per rank, where the contestant counts them.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    peak_bytes: int
    whole_ns: tuple[tuple[int, int], ...] = ()
    steps: tuple[StepSpans, ...] = ()
    tensor_bytes: Mapping[int, int] = field(default_factory=dict)
    failure: Failure | None = None

    def write(self, path: Path) -> None:
        """Write in one piece: a file that is there is whole."""
        data = asdict(self) | {"steps": [packed(step) for step in self.steps]}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(data))
        temporary.replace(path)

    @staticmethod
    def read(path: Path) -> RankResult:
        data = json.loads(path.read_text())
        failure = Failure(**data["failure"]) if data["failure"] else None
        return RankResult(
            tuple(data["seconds"]),
            tuple(data["losses"]),
            data["peak_bytes"],
            tuple((begun, ended) for begun, ended in data["whole_ns"]),
            tuple(map(unpacked, data["steps"])),
            {int(rank): number for rank, number in data["tensor_bytes"].items()},
            failure,
        )


def failed(kind: str, text: str) -> RankResult:
    return RankResult((), (), 0, failure=Failure(kind, text))


def packed(step: StepSpans) -> dict:
    """A step's spans with actions as their text: ``2F0``."""
    return {
        "started_ns": step.started_ns,
        "spans": {r: [[str(s.action), s.start_seconds, s.end_seconds] for s in own] for r, own in step.spans.items()},
    }


def unpacked(data: dict) -> StepSpans:
    return StepSpans(
        {
            int(r): tuple(ActionTiming(Action.parse(a), start, end) for a, start, end in own)
            for r, own in data["spans"].items()
        },
        {int(r): number for r, number in data["started_ns"].items()},
    )
