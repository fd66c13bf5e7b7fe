"""Process groups of a rank beside a default group of the caller's, which may have any backends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar import UsageError
from autopar.runtime.comm.process_group import ProcessGroupTransport, check_default_group

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture(params=[None, "gloo", "cpu:gloo"])
def _default_group(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    dist.init_process_group(request.param, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def transport(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> tuple[ProcessGroupTransport, list[Any]]:
    """A transport over two channels and an axis, and the backend of each group that it makes; none is connected."""
    backends: list[Any] = []
    monkeypatch.setattr(dist, "new_group", lambda *_, backend=None, **__: backends.append(backend))
    monkeypatch.setattr(ProcessGroupTransport, "connect", lambda self: None)
    return ProcessGroupTransport(0, device, {(0, 1, 0), (1, 0, 0)}, [(0, 1)], 60.0, "nccl"), backends


@pytest.mark.usefixtures("_default_group")
def test_groups_have_the_backend_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu, backends = transport(CPU, monkeypatch)
    assert on_cpu.posts_early and backends == ["gloo", "gloo"]  # the axis and checkpoints
    on_gpu, backends = transport(GPU, monkeypatch)
    assert not on_gpu.posts_early and backends == ["nccl", "gloo", "nccl", "nccl", "gloo"]
    assert on_gpu.pair_groups.keys() == {(0, 1, 0), (1, 0, 0)}


@pytest.mark.usefixtures("_default_group")
def test_a_default_group_of_other_ranks_is_refused() -> None:
    check_default_group(0, 1, CPU)
    for rank, world in ((1, 2), (0, 2)):
        with pytest.raises(UsageError, match=f"rank 0 of 1 in the default process group, but rank {rank} of {world}"):
            check_default_group(rank, world, CPU)


@pytest.mark.usefixtures("_default_group")
def test_a_default_group_without_gloo_and_nccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:mpi,cuda:mpi")
    with pytest.raises(UsageError, match=r"has the backends cpu:mpi,cuda:mpi, neither Gloo nor NCCL\. Call torch"):
        check_default_group(0, 1, CPU)


@pytest.mark.usefixtures("_default_group")
def test_gpus_need_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    check_default_group(0, 1, CPU)
    with pytest.raises(UsageError, match=r'no NCCL for GPUs\. Pass backend="gloo"'):
        check_default_group(0, 1, GPU)
