"""A checkpoint is loaded only if all ranks see the same one."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import pytest

from autopar import CheckpointError
from autopar.api.checkpoint import load_on_ranks
from autopar.ir.checkpoint_header import Header

SAVED = Header(
    "model", (), {"precision": "fp32"}, batch=4, seed=0, updates=6, drawn=0, extra={"best": nan}, data="data-6"
)


class Nodes:
    """Ranks whose nodes have disks of their own."""

    def __init__(self, headers: dict[int, Header]) -> None:
        self.headers = headers
        self.loaded: list[Header] = []

    def call_all(self, command: str, folder: str, header: Header | None = None) -> dict[int, Any]:
        if command == "inspect_checkpoint":
            return self.headers
        assert command == "load_checkpoint" and header is not None
        self.loaded.append(header)
        return {rank: CheckpointError("the end of this test") for rank in self.headers}


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (SAVED, "the end of this test"),
        (replace(SAVED, extra={"best": float("nan")}), "the end of this test"),  # a copy
        (replace(SAVED, updates=1, data="data-1"), r"rank 0 one after 6 updates, rank 2 another one after 1 update\."),
        (
            replace(SAVED, files={"__0_0.distcp": 7}),
            r"different checkpoints in .*/runs/last: rank 0 one after 6 updates",
        ),
    ],
)
def test_copies_of_different_age_are_refused(other: Header, error: str) -> None:
    ranks: Any = Nodes({0: SAVED, 1: SAVED, 2: other})
    spec: Any = None
    with pytest.raises(CheckpointError, match=error):
        load_on_ranks(ranks, "runs/last", SAVED, spec)
    assert len(ranks.loaded) == (error == "the end of this test")
