"""Compilation, CUDA graphs and Triton kernels, each tried on the device that ranks would use."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from autopar.errors import WorkerError
from autopar.ir.units import TIME, text
from autopar.tools.doctor.finding import Finding, Probe, Subject
from autopar.tools.doctor.in_processes import result_in_process

if TYPE_CHECKING:
    from autopar.measure.workers import Emit

# The first compilation on a machine also finds out which vector instructions the C++ compiler knows: 5 to 15 s.
COMPILE_LIMIT_SECONDS, GRAPH_LIMIT_SECONDS = 150.0, 60.0
INDUCTOR_REMEDY = (
    "Install a C++ compiler (apt install g++) and, on a GPU, the Triton that torch requires; else pass compile=False. "
    "If it took too long, check again while nothing else computes: what inductor learns of the compiler is kept."
)
GRAPH_REMEDY = "Update the driver, or pass cuda_graph=False: steps then run without a graph."
COMPILER_REMEDY = "Install a C++ compiler (apt install g++), or leave compile=True out: on CPU ranks run uncompiled."
TOLERANCE = 1e-5


def compilation(subject: Subject) -> Iterator[Finding]:
    """Finding on a function that is exported and compiled by inductor, as regions of a model are."""
    on_cpu, compiler = subject.device_type == "cpu", os.environ.get("CXX", "g++")
    if on_cpu and sys.platform == "linux" and shutil.which(compiler) is None:
        # Ranks on CPU run uncompiled by default, so nothing is broken.
        yield Finding("compile", "inductor", "slow", f"no C++ compiler: {compiler} is not on the PATH", COMPILER_REMEDY)
        return
    seconds = result_in_process(f"{__name__}:compile_example", subject.device_type, COMPILE_LIMIT_SECONDS)
    yield Finding("compile", "inductor", "ok", f"a function compiles in {text(seconds, TIME)}, equal to eager")


def cuda_graph(subject: Subject) -> Iterator[Finding]:
    """Finding on the capture and replay of a CUDA graph."""
    if not subject.gpus:
        yield Finding("compile", "CUDA graph", "absent", "no GPU")
        return
    result_in_process(f"{__name__}:replay_example", None, GRAPH_LIMIT_SECONDS)
    yield Finding("compile", "CUDA graph", "ok", "captured and replayed, equal to eager")


def triton_kernels(subject: Subject) -> Iterator[Finding]:
    """Finding on autopar's Triton kernels, which run on GPUs."""
    has_triton = find_spec("triton") is not None
    if subject.gpus and not has_triton:
        remedy = "Install the Triton that torch requires: without it slower operations of torch run."
        yield Finding("compile", "Triton kernels", "slow", "Triton is not installed", remedy)
    elif subject.gpus:
        result_in_process(f"{__name__}:run_kernels", None, GRAPH_LIMIT_SECONDS)
        yield Finding("compile", "Triton kernels", "ok", "run, equal to torch")
    else:
        value = "Triton is installed" if has_triton else "Triton is not installed"
        yield Finding("compile", "Triton kernels", "absent", f"{value}; only GPUs need it")


# -- in a process --------------------------------------------------------------------------------------------------


def compile_example(device_type: str, emit: Emit) -> None:
    """Export and compile a function, compare it with eager, and emit the seconds of the compilation.

    A constant of the function differs each time, so that no cache has its code; what inductor knows of the C++ compiler
    is cached.
    """
    os.environ["TORCH_WARM_POOL"] = "0"  # no pool of processes for one kernel
    import torch
    from torch import nn

    from autopar.codegen.compile import inductor

    constant = 1.0 + time.time() % 1.0

    class Example(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.gelu(x * constant) + x.sin()

    example, x = Example(), torch.linspace(-2.0, 2.0, 4096, device=device_type).reshape(64, 64)
    with torch.no_grad():
        start = time.perf_counter()
        compiled = inductor(torch.export.export(example, (x,)).module(), [x], {"compile_threads": 1})
        made = compiled(x)
        seconds = time.perf_counter() - start
        check_equal("compiled code", made, example(x))
    emit(seconds)


def replay_example(payload: None, emit: Emit) -> None:
    """Capture a product as a CUDA graph, replay it with other numbers, and compare it with eager."""
    import torch

    del payload
    x, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.mm(x, w)  # takes a workspace before the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = x @ w
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    check_equal("a CUDA graph", made, x @ w)
    emit(None)


def run_kernels(payload: None, emit: Emit) -> None:
    """Compare the kernels with torch's operations."""
    import torch

    from autopar.ops.counter_rng import ROUNDS, counter_rows, generate_whole
    from autopar.ops.kernels import accumulate, philox

    del payload
    sums, addend = torch.randn(5000, device="cuda"), torch.randn(5000, device="cuda").bfloat16()
    expected = sums + addend.float()
    accumulate.add(sums, addend)
    check_equal("the sum of gradients", sums, expected)
    draws, counters = counter_rows(seed=1, step=2, first=0, count=3).cuda(), torch.arange(100, device="cuda")
    check_equal("random numbers", philox.generate(counters, draws, 7, ROUNDS), generate_whole(counters, draws, 7))
    emit(None)


def check_equal(what: str, made: object, expected: object) -> None:
    """Raise a WorkerError if numbers differ by more than rounding."""
    import torch

    assert isinstance(made, torch.Tensor) and isinstance(expected, torch.Tensor)
    difference = float((made - expected).abs().max())
    if not difference <= TOLERANCE * float(expected.abs().max()):
        raise WorkerError(f"{what} differs from eager by up to {difference:.3g}")


PROBES = (
    Probe("compile", "inductor", compilation, INDUCTOR_REMEDY, limit_seconds=COMPILE_LIMIT_SECONDS + 30),
    Probe("compile", "CUDA graph", cuda_graph, GRAPH_REMEDY, limit_seconds=GRAPH_LIMIT_SECONDS + 30),
    Probe("compile", "Triton kernels", triton_kernels, INDUCTOR_REMEDY, limit_seconds=GRAPH_LIMIT_SECONDS + 30),
)
