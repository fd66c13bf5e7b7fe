"""What a process holds after models were built, trained and closed in it."""

from __future__ import annotations

import pytest
from support.soak import MODELS, rebuild


@pytest.mark.full
def test_closed_models_leave_no_file_and_no_thread() -> None:
    rows = rebuild(MODELS["cnn"](), 2, {"pp": 2, "tp": 1, "dp": 1}, 4, 1)
    assert len({(row.open_files, row.threads, row.shared_bytes) for row in rows[1:]}) == 1, rows
