"""Environment variables that change how autopar, torch, CUDA and NCCL behave, with what they do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.errors import suggest
from autopar.tools.doctor.finding import Finding, Probe, Subject

UNSET = "Unset it, unless you look for a fault."
OFF = ("", "0", "false", "off", "n", "no")


@dataclass(frozen=True)
class Effect:
    """Effect of a variable.

    Args:
        does: what it does, in a few words.
        slows: values under which training is slower; ``("*",)`` stands for all that are not in `OFF`.
        remedy: for these values.
    """

    does: str
    slows: tuple[str, ...] = ()
    remedy: str = UNSET


ANY = ("*",)
EFFECTS: Mapping[str, Effect] = {
    "AUTOPAR_CACHE": Effect("folder of measured times"),
    "AUTOPAR_MEASURE_SECONDS": Effect("seconds in which a plan's operations are timed"),
    "AUTOPAR_COMPILE_WORKERS": Effect("processes of a rank that compile ahead"),
    "AUTOPAR_QUIET": Effect("switches progress off"),
    "CUDA_VISIBLE_DEVICES": Effect("GPUs that this process sees"),
    "CUDA_DEVICE_ORDER": Effect("order in which GPUs are numbered"),
    "CUDA_DEVICE_MAX_CONNECTIONS": Effect(
        "hardware queues of a GPU", ("1",), "Unset it: with one queue copies and kernels wait for each other."
    ),
    "CUDA_LAUNCH_BLOCKING": Effect("waits for each kernel", ANY),
    "CUDA_MODULE_LOADING": Effect("when kernels are loaded"),
    "OMP_NUM_THREADS": Effect("CPU threads of a process; torchrun sets it to 1"),
    "MKL_NUM_THREADS": Effect("CPU threads of MKL"),
    "PYTORCH_ALLOC_CONF": Effect("settings of torch's allocator; autopar then leaves segments as they are"),
    "PYTORCH_CUDA_ALLOC_CONF": Effect("settings of torch's allocator; autopar then leaves segments as they are"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Effect("asks the driver for the memory of each tensor", ANY),
    "PYTORCH_NVML_BASED_CUDA_CHECK": Effect("looks for GPUs without starting CUDA"),
    "TORCH_COMPILE_DISABLE": Effect("switches torch.compile off", ANY, "Unset it, or pass compile=False."),
    "TORCHDYNAMO_DISABLE": Effect("switches torch.compile off", ANY, "Unset it, or pass compile=False."),
    "TORCHINDUCTOR_CACHE_DIR": Effect("folder of compiled code"),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": Effect("compiles again at each start", ANY),
    "TORCHINDUCTOR_DETERMINISTIC": Effect("compiles the same code each time"),
    "TORCH_DISTRIBUTED_DEBUG": Effect("checks of collectives", ("DETAIL",)),
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": Effect("symmetric memory without NVLink multicast"),
    "GLOO_SOCKET_IFNAME": Effect("network interface of Gloo"),
    "NCCL_SOCKET_IFNAME": Effect("network interface of NCCL"),
    "NCCL_P2P_DISABLE": Effect(
        "NCCL copies through host memory",
        ("1",),
        "Unset it, unless transfers between GPUs hang or are wrong without it.",
    ),
    "NCCL_P2P_LEVEL": Effect("distance up to which NCCL uses peer access"),
    "NCCL_SHM_DISABLE": Effect("NCCL sends over sockets between GPUs without peer access", ("1",)),
    "NCCL_IB_DISABLE": Effect("NCCL sends over sockets between nodes", ("1",)),
    "NCCL_NVLS_ENABLE": Effect("NCCL's use of NVLink multicast"),
    "NCCL_DEBUG": Effect("what NCCL prints", ("TRACE",)),
    "NCCL_ALGO": Effect("algorithm of NCCL's collectives"),
    "NCCL_PROTO": Effect("protocol of NCCL's collectives"),
    "NVIDIA_TF32_OVERRIDE": Effect("TF32 in all products, over what torch says"),
    "MALLOC_ARENA_MAX": Effect("arenas of the C library's allocator"),
    "LD_PRELOAD": Effect("libraries that are loaded first"),
}
PREFIXES = {
    "NCCL_": "a setting of NCCL",
    "TORCH_NCCL_": "a setting of torch's NCCL backend",
    "PYTORCH_": "a setting of torch",
}


def variables(subject: Subject) -> Iterator[Finding]:
    """Findings on the variables that are set, in the order of their names."""
    del subject
    findings = [finding for name, value in sorted(os.environ.items()) for finding in on_variable(name, value)]
    yield from findings or [Finding("variables", "environment", "ok", "none is set that changes how training runs")]


def on_variable(name: str, value: str) -> Iterator[Finding]:
    """Finding on a variable; none if it does not concern training."""
    effect = EFFECTS.get(name)
    if effect is None and name.startswith("AUTOPAR_"):
        known = [other for other in EFFECTS if other.startswith("AUTOPAR_")]
        remedy = f"Remove it or correct its name.{suggest(name, known)}"
        yield Finding("variables", name, "slow", f"{value}: autopar reads no variable of this name", remedy)
        return
    if effect is None:
        does = next((does for prefix, does in PREFIXES.items() if name.startswith(prefix)), None)
        effect = None if does is None else Effect(does)
    if effect is None or (not value and name != "CUDA_VISIBLE_DEVICES"):
        return
    text = f"{value or 'empty'}: {effect.does}"
    is_slow = value.upper() in effect.slows or (effect.slows == ANY and value.lower() not in OFF)
    yield Finding("variables", name, "slow" if is_slow else "ok", text, effect.remedy if is_slow else "")


PROBES = (
    Probe("variables", "environment", variables, "Look at the environment's variables.", needs_torch=False),
)  # fmt: skip
