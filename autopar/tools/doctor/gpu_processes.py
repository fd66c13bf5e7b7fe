"""Work on GPUs in processes of their own: a description of what torch sees, and matrix products under load."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from autopar.measure.machine.cases import Case
from autopar.measure.machine.kernels import kernel_runs
from autopar.measure.timer import Workload, time_kernels
from autopar.measure.workers import Emit, WorkerContext
from autopar.tools.doctor.finding import Gpu
from autopar.tools.doctor.nvidia_smi import GpuState, SmiError, is_installed, states

# A product that fills any GPU; cost models are fitted to it.
PRODUCT = Case("matmul", "forward", "bfloat16", (8192, 8192, 8192))
RUNS_BETWEEN_LOOKS = 50
LOAD_SECONDS = 1.0  # of load before a GPU's state is read: power.draw is a mean of the last second


@dataclass(frozen=True)
class SeenGpus:
    """GPUs that torch sees; ``reason`` says why there is none, where torch knows."""

    gpus: tuple[Gpu, ...]
    reason: str = ""


@dataclass(frozen=True)
class LoadedGpu:
    """A GPU that computes products without pause.

    Args:
        flops, num_bytes: of one product.
        seconds: of one product.
        state: its state meanwhile; None without nvidia-smi.
    """

    index: int
    flops: float
    num_bytes: float
    seconds: float
    state: GpuState | None


def describe(payload: None, emit: Emit) -> None:
    """Emit the `SeenGpus` of this process."""
    del payload
    count = torch.cuda.device_count()
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        emit(SeenGpus((), str(error).strip().partition("\n")[0]))
        return
    gpus: list[Gpu] = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        others = (other for other in range(count) if other != index)
        peers = frozenset(other for other in others if torch.cuda.can_device_access_peer(index, other))
        uuid = str(properties.uuid)
        uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        gpus.append(Gpu(index, properties.name, uuid, properties.total_memory, peers))
    emit(SeenGpus(tuple(gpus)))


def load(uuids: tuple[str, ...], emit: Emit) -> None:
    """Time products on this process's GPU, read its state while it computes, and emit the `LoadedGpu`.

    Args:
        uuids: of all GPUs, by rank.
    """
    worker = WorkerContext.current("cuda")
    kernels = kernel_runs(PRODUCT, worker.device)
    (op,) = kernels.ops
    timing = time_kernels(kernels.runs, worker.device, op.flops)
    state = state_at_work(kernels.runs[0], worker.device, uuids[worker.rank])
    emit(LoadedGpu(worker.rank, op.flops, op.num_bytes, timing.seconds, state))


def state_at_work(run: Workload, device: torch.device, uuid: str) -> GpuState | None:
    """State of a GPU that does nothing but ``run``; None without nvidia-smi, or if that fails."""
    if not is_installed():
        return None
    with ThreadPoolExecutor(1) as pool:
        start, reading = time.monotonic(), None
        while reading is None or not reading.done():
            for _ in range(RUNS_BETWEEN_LOOKS):
                run()
            torch.cuda.synchronize(device)
            if reading is None and time.monotonic() - start >= LOAD_SECONDS:
                reading = pool.submit(states, "-i", uuid)
        try:
            return reading.result()[0]
        except SmiError:  # reported by the probe that reads idle GPUs
            return None
