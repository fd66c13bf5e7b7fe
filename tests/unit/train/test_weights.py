"""Weights in safetensors files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.train import (
    load_weights,
    save_weights,
)
from autopar.train.run import weights


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_tied_weights_survive_the_file(tmp_path: Path):
    model, fresh = TiedHead(), TiedHead()
    save_weights(model.state_dict(), tmp_path / "w.safetensors")
    load_weights(fresh, tmp_path / "w.safetensors")
    assert torch.equal(fresh.second.weight, model.first.weight) and not fresh.training


def test_a_file_that_cannot_be_written_is_not_left_behind(tmp_path: Path):
    with pytest.raises(TypeError):
        save_weights({"w": torch.zeros(2)}, tmp_path / "w.safetensors", {"updates": 3})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_the_old_file_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "w.safetensors"
    seen, write = [], weights.save_file
    monkeypatch.setattr(weights, "save_file", lambda *args: (seen.append(path.exists()), write(*args)))
    save_weights({"w": torch.zeros(2)}, path)
    assert seen == [False] and path.exists()
