"""What the processes that measure are task, as a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.measure.machine.cases import Case

FILE = "assignment.json"


@dataclass(frozen=True)
class Assignment:
    """The cases in order, and the file that the first rank appends their points to."""

    device_type: str
    cases: tuple[Case, ...]
    points: Path

    def write(self, folder: Path) -> None:
        data = {"device_type": self.device_type, "cases": [asdict(c) for c in self.cases], "points": str(self.points)}
        (folder / FILE).write_text(json.dumps(data))

    @staticmethod
    def read(folder: Path) -> Assignment:
        data = json.loads((folder / FILE).read_text())
        cases = tuple(Case(**{**case, "sizes": tuple(case["sizes"])}) for case in data["cases"])
        return Assignment(data["device_type"], cases, Path(data["points"]))
