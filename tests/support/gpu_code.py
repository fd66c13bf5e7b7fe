"""Code that inductor generates for an H200, made on a machine without a GPU, and the bytes that its kernels move.

``PYTHONPATH=tests python -m support.gpu_code MODEL BATCH`` prints the kernels of each region of a model's training step
in bf16, ``--whole`` those of the whole model as one region, in the layouts that torch.compile chooses. ``--folder``
keeps the code. Needs g++: it stands in for the CUDA runtime and driver, which torch asks for devices and streams while
it traces for a GPU. Runs with torch 2.11 and 2.15; nothing is executed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer

RUNTIME = """
#include <cstdint>
#include <cstring>
struct Stream { int8_t type; int8_t index; int64_t id; };
static int properties(char* p) {  // offsets in cudaDeviceProp of CUDA 13
  memset(p, 0, 1008);
  *(int*)(p + 304) = 65536; *(int*)(p + 308) = 32; *(int*)(p + 320) = 1024; *(int*)(p + 360) = 9;
  return 0;
}
extern "C" {
Stream _ZN3c104cuda20getCurrentCUDAStreamEa(int8_t) { return Stream{1, 0, 0}; }
Stream _ZN3c104cuda20getDefaultCUDAStreamEa(int8_t) { return Stream{1, 0, 0}; }
int cudaGetDeviceCount(int* n) { *n = 1; return 0; }
int cudaGetDevice(int* n) { *n = 0; return 0; }
int cudaDeviceGetAttribute(int* value, int, int) { *value = 0; return 0; }
int cudaDeviceGetStreamPriorityRange(int* a, int* b) { *a = 0; *b = -1; return 0; }
int cudaStreamIsCapturing(void*, int* status) { *status = 0; return 0; }
int cudaGetDeviceProperties(char* p, int) { return properties(p); }
"""
SUCCEEDING = (
    *("SetDevice", "GetLastError", "PeekAtLastError", "EventCreateWithFlags", "EventRecord", "EventDestroy"),
    *("EventQuery", "StreamWaitEvent", "StreamQuery", "StreamSynchronize", "DeviceSynchronize"),
)
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, total_memory=141 << 30,
    shared_memory_per_block_optin=232448, L2_cache_size=52 << 20, gcnArchName="",
)  # fmt: skip
READY = "AUTOPAR_GPU_CODE"


def start_with_libraries() -> None:
    """Start this program again, with libraries in place of the CUDA runtime's and driver's functions."""
    folder = Path(tempfile.mkdtemp(prefix="autopar-gpu-code-"))
    functions = "".join(f"int cuda{name}(...) {{ return 0; }}\n" for name in SUCCEEDING)
    libraries = Path(torch.__file__).parent / "lib"
    names = {n.decode() for n in re.findall(rb"\bcu[A-Z][A-Za-z0-9_]+\b", (libraries / "libc10_cuda.so").read_bytes())}
    names |= {n.decode() for n in re.findall(rb"\bcuDevice[A-Z]\w+\b", (libraries / "libtorch_cuda.so").read_bytes())}
    known = "int cuDevicePrimaryCtxGetState(int, unsigned* f, int* a) { *f = 0; *a = 1; return 0; }\n"
    others = "".join(f"int {n}(...) {{ return 0; }}\n" for n in sorted(names - {"cuDevicePrimaryCtxGetState"}))
    sources = {"libcudart-none.so": f"{RUNTIME}{functions}}}", "libcuda.so.1": f'extern "C" {{\n{known}{others}}}'}
    for name, source in sources.items():
        (folder / f"{name}.cpp").write_text(source)
        command = ["g++", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", f"{folder / name}.cpp", "-o", folder / name]
        subprocess.run(command, check=True)
    new = {READY: "1", "LD_PRELOAD": str(folder / "libcudart-none.so"), "LD_LIBRARY_PATH": str(folder)}
    new |= {
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    os.execve(sys.executable, [sys.executable, "-m", "support.gpu_code", *sys.argv[1:]], os.environ | new)


def as_on_an_h200() -> list[str]:
    """Let inductor see an H200 and load no kernels; returns the list that it will add its code to."""

    def gives(value: Any) -> Any:
        return lambda *args, **kwargs: value

    for name, value in {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": H200, "set_device": None,
        "get_device_capability": (9, 0), "get_device_name": H200.name, "_lazy_init": None, "_exchange_device": 0,
        "_maybe_exchange_device": 0, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, gives(value))
    import torch._inductor.config as config
    import torch._subclasses.fake_tensor as fake_tensor
    import torch.utils._triton as torch_triton
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget

    for name, value in {"is_available": True, "get_compute_capability": 90, "is_bf16_supported": True,
                        "is_triton_capable": True, "raise_if_triton_unavailable": None}.items():  # fmt: skip
        setattr(CudaInterface, name, staticmethod(gives(value)))
    CudaInterface.Worker.get_device_properties = staticmethod(gives(H200))
    CudaInterface.Worker.current_device = staticmethod(gives(0))
    target = GPUTarget("cuda", 90, 32)
    driver: Any = SimpleNamespace(get_current_target=gives(target), get_current_device=gives(0))
    triton.runtime.driver.set_active(driver)
    torch_triton.has_triton = gives(True)
    fake_tensor.init_gpu_context = gives(None)
    fuse_attention._sfdp_init = pad_mm._pad_mm_init = gives(None)  # make tensors on the device
    config.joint_graph_constant_folding = False  # as does this
    config.benchmark_kernel = True  # writes the bytes of each kernel
    AsyncCompile.triton = gives(None)
    AsyncCompile.wait = gives(None)
    codes: list[str] = []
    GraphLowering.save_output_code = staticmethod(codes.append)
    return codes


def kernels_of(code: str) -> tuple[int, float, int]:
    """Calls of inductor's own kernels, their gigabytes, and calls of other kernels."""
    kernel = r"async_compile\.triton\('(\w+)'(?:(?!async_compile).)*?'kernel_num_gb': ([\d.e-]+)"
    sizes = dict(re.findall(kernel, code, re.DOTALL))
    body = code[code.index("def call(self") : code.index("runner = Runner")]
    calls = re.findall(r"(triton_\w+)\.run\(", body)
    others = re.findall(r"(?:extern_kernels|torch\.ops)\.[\w.]+\(", body)
    return len(calls), sum(float(sizes.get(call, 0)) for call in calls), len(others)


def main(
    model: str,
    batch: int,
    whole: Annotated[bool, typer.Option("--whole", help="Compile the model as one region.")] = False,
    img_size: Annotated[int | None, typer.Option(help="Side of the images; by default the model's own.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the code of each region goes.")] = None,
) -> None:
    if READY not in os.environ:
        start_with_libraries()
    codes = as_on_an_h200()
    import autopar
    from autopar.api.model_source import ModelSource, default_input_shape
    from autopar.api.planning.plan import example_call
    from autopar.api.program_cache import ProgramCache
    from autopar.codegen import compile as compiled
    from autopar.codegen import emit
    from autopar.trace.passes import layouts

    asked: dict[str, Any] = {"hardware": "h200-nvlink", "precision": "bf16", "cost": "analytic", "recompute": "none"}
    if whole:
        emit.region_starts = layouts.region_starts = lambda ops, required=(): (0,)
        compiled.cuda_options = lambda ops, device: {}
        asked["channels_last"] = False
    built = ModelSource(model, {}).build("meta")
    shape = default_input_shape(built, batch) if img_size is None else (batch, 3, img_size, img_size)
    x = torch.empty(shape, device="meta")
    plan = autopar.plan(built, 1, x, microbatches=1, **asked)
    cache = ProgramCache(built, plan, example_call(built, x, None, None))
    (program,) = next(own for own in cache.specializations.values() if own.number == cache.planned[0]).programs
    weights = dict[str, torch.Tensor]()
    for weight in program.weights:
        tensor = torch.empty_strided(
            weight.shape, weight.value.stride, dtype=getattr(torch, weight.dtype), device="meta"
        )
        weights[weight.name] = tensor.requires_grad_(weight.requires_grad)
    random_numbers = compiled.with_random_arguments
    compiled.with_random_arguments = lambda ops: on_no_device(*random_numbers(ops))
    stage = emit.graph_module(program, weights, torch.device("cuda", 0), compiled=True)
    regions = {name: m for name, m in stage.named_modules() if isinstance(m, compiled.CompiledRegion)}
    total, first_of = [0, 0.0, 0], dict[int, str]()
    for name, region in regions.items():
        if (first := first_of.setdefault(id(region.code), name)) != name:
            print(f"{name}: as {first}")
            continue
        codes.clear()
        region.code.source.compile()
        times = sum(other.code is region.code for other in regions.values())
        for direction, code in zip(("forward", "backward"), codes):
            kernels, gigabytes, others = found = kernels_of(code)
            print(f"{name} {direction}: {kernels} kernels, {gigabytes:.2f} GB, {others} others", flush=True)
            total = [a + times * b for a, b in zip(total, found)]
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{name}-{direction}.py").write_text(code)
    print(f"{model}, {batch}: {total[0]} kernels, {total[1]:.1f} GB, {total[2]} others")


def on_no_device(ops: Any, numbers: dict[str, torch.Tensor]) -> tuple[Any, dict[str, Any]]:
    """Numbers of random streams that stay without data where they are moved to a GPU."""
    return ops, {name: SimpleNamespace(to=lambda device, n=n: n.to("meta")) for name, n in numbers.items()}


if __name__ == "__main__":
    typer.run(main)
