"""Models that are saved and loaded, and the tensors of a checkpoint."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import autopar
from autopar.api.checkpoint import read_header
from autopar.ir.checkpoint_header import sealed
from autopar.runtime.checkpoint.folder import HEADER, TRAINING, sha256
from autopar.runtime.checkpoint.rank_state import decoded_training, whole_tensor
from autopar.runtime.checkpoint.reshard_planners import DataReader, PartsLoadPlanner, read_metadata
from support.models import tiny_vit

torch.manual_seed(0)
IMAGES, LABELS = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
ROWS, CLASSES = torch.randn(8, 8), torch.randint(0, 4, (8,))
# A larger eps than the default: parameters whose true gradient is zero would amplify the order of sums.
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
STEPLR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
VIT: dict[str, Any] = {"embed_dim": 32, "num_heads": 4}


def grouped(params: Any) -> torch.optim.Optimizer:
    """AdamW with weight decay on weights and none on biases."""
    named = list(params.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named if not n.endswith("weight")], "weight_decay": 0.0},
    ]
    return ADAMW(groups)


class Convolutions(nn.Module):
    """Convolutions, each followed by batch norm."""

    def __init__(self) -> None:
        super().__init__()
        block = functools.partial(nn.Conv2d, kernel_size=3, stride=2, padding=1, bias=False)
        self.layers = nn.Sequential(block(3, 8), nn.BatchNorm2d(8), nn.GELU(), block(8, 8), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.layers(x)).mean((2, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: tiny_vit(2, proj_drop_rate=0.1, **VIT),
    "convolutions": Convolutions,
}


def start(name: str, devices: int = 1, seed: int = 0, **options: Any) -> autopar.ParallelModel:
    """A model with weights that depend on ``seed``."""
    torch.manual_seed(seed)
    given: dict[str, Any] = {"optimizer": grouped, "lr_scheduler": STEPLR, "microbatches": 2} | options
    return autopar.parallelize(MODELS[name](), devices, IMAGES, **given)


def trained(pm: autopar.ParallelModel, steps: int = 3) -> list[float]:
    """Losses of training steps, each on another order of the samples."""
    losses = []
    for step in range(steps):
        losses.append(pm.train_step(IMAGES.roll(step, 0), LABELS.roll(step, 0)).loss)
        pm.lr_scheduler.step()
    return losses


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """Unsharded tensors of a checkpoint by name, and the scalars of the optimizer's state."""
    data = folder / read_header(folder).data
    saved = read_metadata(data).state_dict_metadata
    tensors: dict[str, torch.Tensor] = {}
    for key, about in saved.items():
        assert isinstance(about, TensorStorageMetadata)
        tensors[key] = torch.empty(about.size, dtype=about.properties.dtype)
    pieces = [whole_tensor(key, tensor) for key, tensor in tensors.items()]
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.load({}, storage_reader=DataReader(data), planner=PartsLoadPlanner(lambda _: pieces), no_dist=True)
    training = decoded_training((data / "training.pt").read_bytes())
    for name, state in training.states.items():
        tensors |= {f"{name}.{key}": torch.as_tensor(value) for key, value in state.values.items()}
        tensors[f"{name} decay"] = torch.as_tensor(training.groups[state.group]["weight_decay"])
    return tensors


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(actual[n], expected[n])] == []


def small(
    model: nn.Module | None = None, seed: int = 0, rows: torch.Tensor = ROWS, devices: int = 1, **options: Any
) -> Any:
    torch.manual_seed(7)
    built = model or nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    given: dict[str, Any] = {"optimizer": ADAMW} | options
    return autopar.parallelize(built, devices, rows, seed=seed, **given)


def save_small(folder: Path) -> Path:
    """Folder with a checkpoint of `small` after one step."""
    with small() as pm:
        pm.train_step(ROWS, CLASSES)
        pm.save_checkpoint(folder, {"step": 1})
    return folder


@contextmanager
def unchanged(pm: Any) -> Iterator[None]:
    """Check that an error inside leaves the state as it was, and that training continues."""
    before = pm.state_dict()
    yield
    assert_equal(pm.state_dict(), before)
    assert pm.train_step(ROWS, CLASSES).loss > 0


def edit_header(folder: Path, **fields: Any) -> None:
    """Replace fields of a checkpoint's header, with the hash that a save would have given it."""
    path = folder / HEADER
    data = json.loads(path.read_text()) | fields
    data.pop("sha256")
    path.write_text(sealed(json.dumps(data, indent=1)))


def rehash(folder: Path) -> None:
    """Give the header the sizes and hashes that the files have now, as if a save had written them so."""
    header = read_header(folder)
    paths = [folder / header.data / name for name in header.files]
    edit_header(folder, files={path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in paths})


def as_version_1(folder: Path) -> None:
    """Change a checkpoint into one of version 1: sizes without hashes, and no random states."""
    header = read_header(folder)
    data = folder / header.data
    training = torch.load(data / TRAINING, weights_only=True)
    del training["random"]
    torch.save(training, data / TRAINING)
    (data / HEADER).unlink()
    fields = json.loads((folder / HEADER).read_text())
    del fields["sha256"]
    files = {name: (data / name).stat().st_size for name in header.files}
    (folder / HEADER).write_text(json.dumps(fields | {"schema_version": 1, "files": files}, indent=1) + "\n")
