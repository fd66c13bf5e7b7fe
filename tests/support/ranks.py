"""Cases that run on several real processes over Gloo: one group of processes for all cases of a test module."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from support.forks import forked

from autopar.ir.mesh import Mesh
from autopar.runtime.comm.mesh_groups import MeshGroups, connect_mesh_groups

WORLD = 4
TIMEOUT_SECONDS = 60


def run_on_ranks(script: str, folder: Path) -> Mapping[str, str]:
    """What went wrong in each case of a script that calls `main`; empty text for nothing.

    Args:
        folder: for the ranks to find each other in.
    """
    done = forked(Path(script), [], [{"FOLDER": str(folder), "RANK": str(rank)} for rank in range(WORLD)], None)
    assert not done.returncode, done.stderr[-3000:]
    errors: dict[str, str] = {}
    for r in range(WORLD):
        for case, text in json.loads((folder / f"{r}.json").read_text()).items():
            errors[case] = errors.get(case, "") + (f"rank {r}: {text}\n" if text else "")
    return errors


def main(cases: Mapping[str, Callable[[], None]]) -> None:
    """Run all cases as one of the ranks."""
    torch.set_num_threads(1)
    rank, folder = int(os.environ["RANK"]), Path(os.environ["FOLDER"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )  # fmt: skip
    errors = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        try:
            case()
            errors[name] = ""
        except Exception:
            errors[name] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(errors))
    dist.barrier()
    dist.destroy_process_group()


@cache
def tensor_axis(tp: int) -> MeshGroups:
    """The axes of a mesh whose tensor axis has so many ranks, made when all ranks first ask for it."""
    axes = connect_mesh_groups(Mesh(1, tp, WORLD // tp), dist.get_rank(), TIMEOUT_SECONDS)
    assert axes.register(f"test{tp}", torch.device("cpu"))["tp"] == axis_key(tp)
    return axes


def axis_key(tp: int) -> str:
    """What the collectives call that axis."""
    return f"test{tp}.tp"


def summed(tensor: torch.Tensor, axes: MeshGroups) -> torch.Tensor:
    """The sum over the tensor axis."""
    total = tensor.detach().clone()
    dist.all_reduce(total, group=axes.communicators["tp"].group)
    return total


def index(axes: MeshGroups) -> Mapping[str, int]:
    """This rank's number on the tensor axis, as `autopar.sharding.tensors` takes it."""
    return {"tp": axes.communicators["tp"].rank}
