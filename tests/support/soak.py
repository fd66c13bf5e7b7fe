"""Soak: steps of all kinds for hours, with what the caller and the workers hold, and whether that stays flat.

``python -m support.soak --model vit --devices 2 --steps 10000`` in the folder of the tests, also under torchrun.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import nn

import autopar

BATCH = 8
CLASSES = 10
SIZES = tuple(range(16, 64, 4))  # of images: twelve
SCALARS = 16  # different values of the scalar argument
MAX_SLOPE_MIB = 1.0  # of memory for each thousand steps, that flat lines may have


class SmallViT(nn.Module):
    """A transformer over patches of images of any size, with a scalar argument."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        block = partial(nn.TransformerEncoderLayer, width, 2, 64, batch_first=True)
        self.blocks = nn.Sequential(block(), block())
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(x.mean(1)) / temperature


class SmallCNN(nn.Module):
    """Convolutions with batch norm, with a scalar argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        return self.head(self.second(self.first(x)).mean((2, 3))) / temperature


MODELS: dict[str, Callable[[], nn.Module]] = {"vit": SmallViT, "cnn": SmallCNN}


@dataclass(frozen=True)
class Usage:
    """What the processes hold after a number of steps; bytes by process, the caller's first."""

    step: int
    resident_bytes: tuple[int, ...]
    open_files: int
    threads: int
    shared_bytes: int
    variants: int

    def __str__(self) -> str:
        resident = " ".join(f"{num / 2**20:7.1f}" for num in self.resident_bytes)
        return (
            f"{self.step:6d} steps | {resident} MiB | {self.open_files} files | {self.threads} threads | "
            f"{self.shared_bytes / 2**20:.1f} MiB shared | {self.variants} programs"
        )


def usage(step: int, pm: Any) -> Usage:
    """What this process and its children hold now."""
    gc.collect()
    own = psutil.Process()
    processes = [own, *sorted(own.children(recursive=True), key=lambda process: process.pid)]
    infos = [process.memory_full_info() for process in processes]
    return Usage(
        step,
        tuple(info.uss for info in infos),
        sum(process.num_fds() for process in processes),
        threading.active_count() + sum(process.num_threads() for process in processes),
        shared_bytes(),
        len(pm._programs.specializations) if pm is not None else 0,
    )


def shared_bytes() -> int:
    """Allocated bytes of the anonymous files through which this process and its workers pass tensors."""
    files = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum(file.stat().st_blocks * 512 for file in files if str(file.readlink()).startswith("/memfd:"))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Slope of the line through points that outliers move least: the median over all pairs (Theil and Sen)."""
    return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2))


def growth(rows: Sequence[Usage]) -> list[str]:
    """What grows over the second half of the rows; empty if all is flat."""
    late = rows[len(rows) // 2 :]
    grown = []
    for number in range(len(late[0].resident_bytes)):
        mib = 1000 / 2**20 * slope([(row.step, row.resident_bytes[number]) for row in late])
        name = "the caller" if number == 0 else f"child {number}"
        print(f"{name}: {mib:+.2f} MiB for each 1000 steps")
        grown += [f"memory of {name}: {mib:+.2f} MiB for each 1000 steps"] if mib > MAX_SLOPE_MIB else []
    for name in ("open_files", "threads", "shared_bytes", "variants"):
        first, last = getattr(late[0], name), getattr(late[-1], name)
        grown += [f"{name}: {first}, then {last}"] if slope([(r.step, getattr(r, name)) for r in late]) > 0 else []
    return grown


def run_steps(pm: Any, steps: int, every: int, folder: Path) -> list[Usage]:
    """Steps of all kinds in turn; prints and returns what the processes hold."""
    torch.manual_seed(pm.data_rank)
    rows, generator = [], torch.Generator().manual_seed(0)  # equal kinds on all ranks
    share = BATCH // pm.data_size
    for step in range(1, steps + 1):
        draw, scalar, images, samples = torch.randint(0, 2**31, (4,), generator=generator).tolist()
        size = SIZES[images % len(SIZES)] if draw % 3 == 0 else 32
        temperature = 1 + scalar % SCALARS / SCALARS if draw % 3 == 1 else 1.0
        batch = 1 + samples % share if draw % 3 == 2 else share
        x, y = torch.randn(batch, 3, size, size), torch.randint(0, CLASSES, (batch,))
        if step % 10 == 0:
            pm.eval()(x, temperature)
            pm.train()
        elif step % 10 == 5:
            pm.forward_backward((x, temperature), y)
            pm.optimizer_step()
        else:
            pm.train_step((x, temperature), y, return_outputs=step % 7 == 0)
        if step % 50 == 0:
            pm.save_checkpoint(folder)
            pm.state_dict()
            pm.stats()
        if step % 250 == 0:
            pm.load_checkpoint(folder)
        if step % every == 0:
            rows.append(usage(step, pm))
            print(rows[-1], flush=True)
    return rows


def build(model: nn.Module, devices: int, mesh: dict[str, int]) -> Any:
    x = torch.randn(BATCH, 3, 32, 32)
    options: dict[str, Any] = {"microbatches": 2} | mesh
    return autopar.parallelize(model, devices, (x, 1.0), optimizer=partial(torch.optim.AdamW, lr=1e-3), **options)


def rebuild(model: nn.Module, devices: int, mesh: dict[str, int], times: int, every: int) -> list[Usage]:
    """Build, train and close a model again and again."""
    rows = []
    for number in range(1, times + 1):
        with build(model, devices, mesh) as pm:
            pm.train_step((torch.randn(BATCH, 3, 32, 32), 1.0), torch.zeros(BATCH, dtype=torch.int64))
        del pm
        if number % every == 0:
            rows.append(usage(number, None))
            print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str]) -> list[str]:
    """Run; returns what has grown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="vit")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--dp", action="store_true", help="two replicas instead of two stages")
    parser.add_argument("--rebuild", action="store_true", help="each step builds, trains and closes the model")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    mesh = {"pp": 1, "tp": 1, "dp": args.devices} if args.dp else {"pp": args.devices, "tp": 1, "dp": 1}
    model, begin = MODELS[args.model](), time.perf_counter()
    if args.rebuild:
        rows = rebuild(model, args.devices, mesh, args.steps, args.every)
    else:
        with tempfile.TemporaryDirectory() as folder, build(model, args.devices, mesh) as pm:
            # One folder for all ranks of a launcher.
            rows = run_steps(pm, args.steps, args.every, Path(pm.broadcast_from_rank0(folder)) / "last")
    grown = growth(rows)
    print(f"{'grows: ' + '; '.join(grown) if grown else 'flat'} ({time.perf_counter() - begin:.0f} s)", flush=True)
    return grown


if __name__ == "__main__":
    grown = main(sys.argv[1:])
    sys.stdout.flush()
    if os.environ.get("RANK") is None:
        sys.exit(bool(grown))
