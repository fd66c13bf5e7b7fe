"""Printed result of ``autopar verify``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Column

from autopar.ir.text import NONE, numeric, plain_table
from autopar.ir.units import BYTES, text
from autopar.runtime.checkpoint.verify import Verified


def verify_parts(results: Sequence[Verified]) -> Sequence[RenderableType]:
    """A row per checkpoint: updates, files, bytes, and whether it is as it was saved."""
    table = plain_table(Column("checkpoint", overflow="fold"), *numeric("updates", "files", "size"), "state")
    for result in results:
        header = result.header
        figures = [NONE] * 3
        if header is not None:
            num_bytes = sum(file.size for file in header.files.values())
            figures = [f"{header.updates:,}", str(len(header.files)), text(num_bytes, BYTES)]
        table.add_row(str(result.folder), *figures, state(result))
    return [table]


def verify_numbers(results: Sequence[Verified]) -> dict[str, Any]:
    """The checkpoints for programs; keys as in docs/command_line.md."""
    return {
        "ok": all(result.fault is None for result in results),
        "checkpoints": [
            {
                "folder": result.folder,
                "state": state(result),
                "fault": result.fault,
                "model": None if result.header is None else result.header.model,
                "updates": None if result.header is None else result.header.updates,
                "files": None if result.header is None else {n: f.size for n, f in result.header.files.items()},
            }
            for result in results
        ],
    }


def state(result: Verified) -> str:
    """State of a checkpoint in a few words."""
    if result.fault is not None or result.header is None:
        return "damaged"
    return "as saved" if result.header.has_hashes else "no hashes; sizes as saved"
