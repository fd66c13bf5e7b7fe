"""Cases on four processes over Gloo: one process group for all cases of a test module."""

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

from autopar.ir.mesh import Mesh
from autopar.ops.collectives import on
from autopar.runtime.comm.axis_communicators import GroupCommunicator, register_axes
from autopar.runtime.comm.process_group import ProcessGroupTransport
from support.forks import forked

WORLD = 4
TIMEOUT_SECONDS = 60


def run_on_ranks(script: str, folder: Path) -> Mapping[str, str]:
    """Error text of each case of a script that calls `main`; empty where a case passes.

    Args:
        folder: where the ranks meet.
    """
    done = forked(Path(script), [], [{"FOLDER": str(folder), "RANK": str(rank)} for rank in range(WORLD)], None)
    assert not done.returncode, done.stderr[-3000:]
    errors: dict[str, str] = {}
    for r in range(WORLD):
        for case, text in json.loads((folder / f"{r}.json").read_text()).items():
            errors[case] = errors.get(case, "") + (f"rank {r}: {text}\n" if text else "")
    return errors


def main(cases: Mapping[str, Callable[[], None]]) -> None:
    """Run all cases on this rank."""
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


def connected(mesh: Mesh, timeout_seconds: float = TIMEOUT_SECONDS) -> ProcessGroupTransport:
    """A transport with process groups for the axes of a mesh; all ranks call."""
    rank_sets = sorted({mesh.group(rank, axis) for rank in range(mesh.devices) for axis in mesh.axes})
    return ProcessGroupTransport(dist.get_rank(), torch.device("cpu"), (), rank_sets, timeout_seconds)


@cache
def tensor_axis(tp: int) -> GroupCommunicator:
    """Tensor axis of a mesh with ``tp`` ranks on it; the first call must come from all ranks."""
    mesh = Mesh(1, tp, WORLD // tp)
    assert register_axes(f"test{tp}", mesh, connected(mesh))["tp"] == axis_key(tp)
    axis = on(axis_key(tp))
    assert isinstance(axis, GroupCommunicator)
    return axis


def axis_key(tp: int) -> str:
    """Key of that tensor axis, as collectives take it."""
    return f"test{tp}.tp"


def summed(tensor: torch.Tensor, axis: GroupCommunicator) -> torch.Tensor:
    """Sum of a tensor over the tensor axis."""
    total = tensor.detach().clone()
    dist.all_reduce(total, group=axis.group)
    return total


def index(axis: GroupCommunicator) -> Mapping[str, int]:
    """Index of this rank on the tensor axis, as `autopar.sharding.tensors` takes it."""
    return {"tp": axis.rank}
