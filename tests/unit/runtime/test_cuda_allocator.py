"""When torch's allocator of GPU memory is set up."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.memory.cuda_allocator import VARIABLES, let_segments_grow


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append)
    return made


def test_segments_grow(settings: list[str]) -> None:
    let_segments_grow({"PATH": "/bin"})
    assert settings == ["expandable_segments:True"]


@pytest.mark.parametrize("variable", VARIABLES)
def test_what_users_have_set_stays(settings: list[str], variable: str) -> None:
    let_segments_grow({variable: "max_split_size_mb:512"})
    assert settings == []


def test_torch_knows_the_setting() -> None:
    """A private function, and a name that only it reads."""
    let_segments_grow({})
