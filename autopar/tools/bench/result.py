"""The result of a bench: rows of baselines and variants, and what they hold for; a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from autopar.errors import UsageError
from autopar.tools.bench.row import BenchRow

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class BenchResult:
    """Rows, and the model, machine and versions that they hold for.

    Args:
        memory: what ``peak_bytes`` of the rows count.
    """

    model: str
    model_kwargs: Mapping[str, Any]
    shape: tuple[int, ...]
    devices: int
    precision: str
    channels_last: bool
    compiled: bool
    plan: str
    flops_per_image: float
    warmup: int
    steps: int
    seed: int
    memory: str
    machine: str
    torch: str
    autopar: str
    commit: str | None
    command: str
    rows: tuple[BenchRow, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def batch(self) -> int:
        return self.shape[0]

    @property
    def best(self) -> tuple[BenchRow, ...]:
        """The fastest row of each baseline."""
        return tuple(row for row in self.rows if row.best)

    def row(self, baseline: str) -> BenchRow:
        """The fastest row of a baseline."""
        return next(row for row in self.best if row.contestant == baseline)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @staticmethod
    def load(path: Path) -> BenchResult:
        """The result in a file.

        Raises:
            UsageError: the file cannot be read, or holds something else.
        """
        try:
            data = json.loads(path.read_text())
        except OSError as error:
            raise UsageError(f"Cannot read bench file {path}: {error.strerror}.") from error
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UsageError(f"Bench file {path} is not complete JSON: {error}. Run `autopar bench` again.") from error
        if not isinstance(data, dict) or "rows" not in data:
            raise UsageError(f"{path} is no bench file: it has no rows. Give one that `autopar bench … -o` wrote.")
        try:
            result = TypeAdapter(BenchResult).validate_python(data)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise UsageError(f"{path} is no valid bench file. Field {'; field '.join(problems[:3])}.") from error
        if result.schema_version != SCHEMA_VERSION:
            raise UsageError(
                f"{path} has schema_version {result.schema_version}, this autopar reads {SCHEMA_VERSION}. Run "
                "`autopar bench` again."
            )
        return result

    def _repr_html_(self) -> str:
        """The printed result, as notebooks show it."""
        from autopar.ir.html import html_of  # slow: imports rich
        from autopar.tools.report.bench_table import bench_parts

        return html_of(bench_parts(self))
