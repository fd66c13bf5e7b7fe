"""What a caller may ask of planning and running, checked once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, get_args, runtime_checkable

from autopar.errors import UsageError
from autopar.ir.hardware import ExecutionMode
from autopar.ir.plan import INTERLEAVED, AskedSchedule, Balance, CostSource, Precision, Recompute
from autopar.runtime.comm.protocols import TransportName

BYTE_UNITS: Mapping[str, int] = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


@runtime_checkable
class LimitsNorm(Protocol):
    """An optimizer callable with a limit to the norm of all gradients, of which each rank's optimizer sees but some."""

    @property
    def clip_grad_norm(self) -> float | None: ...


@dataclass(frozen=True)
class Options:
    """Constraints on the plan and settings of the run; None leaves a choice to the planner.

    ``memory`` is byte per device; ``timeout`` the longest wait for a peer inside a step, second. ``pp``, ``tp`` and
    ``dp`` multiply to the number of devices; ``microbatches`` counts per data-parallel replica and ``microbatch_size``
    is the most samples of one; they come in equal parts but for the last, as torch.chunk cuts, and a warning says where
    that changes the number given. ``zero1`` shares the optimizer's state among replicas. ``schedule`` "auto" takes
    1f1b, interleaved or interleaved-overlap, whichever is predicted fastest; of the latter two each rank has ``chunks``
    stages. ``clip_grad_norm`` limits the 2-norm of all gradients together, ``clip_grad_value`` each of their elements.
    ``precision`` is the model's own, or bf16 or fp16 as `torch.autocast` computes, or bf16-params: all but batch norm
    computes with bfloat16 copies of the parameters, on bfloat16 inputs, as under FSDP2's
    ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``; weights are float32 in each. ``recompute``: "auto" has stages
    compute activations again in the backward only where that is what makes a plan fit, or a better one; results are the
    same, so it is the default.

    ``cost``: "measured" times the operations of promising plans on the device at hand, compiled and captured as they
    will run, and keeps that on disk (`autopar.measure.regions`); "analytic" prices them by the cost model ``hardware``;
    "auto" takes measurements where an earlier plan has left all that are asked for, and measures nothing.

    ``compile``: have torch.compile make the kernels of each stage, and ``cuda_graph``: replay a whole training step as
    one CUDA graph; both by default where the devices are GPUs. ``transport``: what carries tensors between the GPUs of
    a pipeline or a tensor-parallel group, "symmetric" (each reaches the others' memory), "nccl", or "auto": the first
    where it can be.
    """

    pp: int | None = None
    tp: int | None = None
    dp: int | None = None
    zero1: bool | None = None
    chunks: int | None = None
    microbatches: int | None = None
    microbatch_size: int | None = None
    schedule: AskedSchedule = "1f1b"
    balance: Balance = "time"
    pins: Mapping[str, int] = field(default_factory=dict)
    memory: int | None = None
    precision: Precision | None = None
    recompute: Recompute = "auto"
    hardware: str | None = None
    cost: CostSource = "auto"
    backend: str | None = None
    compile: bool | None = None
    cuda_graph: bool | None = None
    transport: TransportName = "auto"
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    solver_seconds: float = 10.0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("pp", "tp", "dp", "chunks", "microbatches", "microbatch_size"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise UsageError(f"{name}={number!r} must be a whole number of at least 1.")
        for name in ("zero1", "compile", "cuda_graph"):
            if getattr(self, name) not in (None, True, False):
                raise UsageError(
                    f"{name}={getattr(self, name)!r} must be True or False; leave it out to have it chosen."
                )
        balances = ("time", "params", "flops", "uniform")
        schedules = ("1f1b", "gpipe", *INTERLEAVED, "auto")
        choices = {
            "transport": get_args(TransportName),
            "schedule": schedules,
            "balance": balances,
            "recompute": ("none", "all", "auto"),
            "cost": ("analytic", "measured", "auto"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name}={getattr(self, name)!r} is unknown. It is one of {', '.join(known)}.")
        if self.precision not in (None, *get_args(Precision)):
            raise UsageError(
                f"precision={self.precision!r} is unknown. It is fp32, bf16, fp16 or bf16-params for a model with "
                "float32 parameters; leave it out to compute in the model's own precision."
            )
        for name in ("memory", "clip_grad_norm", "clip_grad_value", "solver_seconds", "timeout"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int | float) or isinstance(number, bool) or number <= 0):
                raise UsageError(f"{name}={number!r} must be a number above 0.")
        if self.schedule in ("1f1b", "gpipe") and (self.chunks or 1) > 1:
            raise UsageError(
                f"chunks={self.chunks} with schedule={self.schedule!r}, under which each rank has one. Use "
                f"schedule={', '.join(map(repr, INTERLEAVED))} or 'auto', or leave chunks out."
            )
        if self.backend not in (None, "gloo", "nccl"):
            raise UsageError(f"backend={self.backend!r} is unknown. It is gloo (CPU) or nccl (GPU).")
        if self.clip_grad_norm is not None and self.clip_grad_value is not None:
            raise UsageError("Pass clip_grad_norm or clip_grad_value, not both.")
        if self.microbatches is not None and self.microbatch_size is not None:
            raise UsageError("Pass microbatches or microbatch_size, not both.")

    def check_machine(self, device_type: str) -> None:
        """Refuse what devices of this type do not have.

        Raises:
            UsageError: names the option.
        """
        if device_type != "cpu":
            return
        for name, value in (("cuda_graph", self.cuda_graph), ("transport", self.transport)):
            if value not in (None, False, "auto"):
                raise UsageError(f"{name}={value!r} needs GPUs; this run has CPU processes and Gloo. Leave it out.")

    def execution_mode(self, device_type: str) -> ExecutionMode:
        """How programs run on devices of this type."""
        on_gpu = device_type == "cuda"
        return ExecutionMode(
            compiled=on_gpu if self.compile is None else self.compile,
            captured=on_gpu and self.cuda_graph is not False,
        )

    def norm_limit(self, optimizer: Any) -> float | None:
        """What to clip the norm of all gradients to, for an optimizer that may have a limit of its own.

        Raises:
            UsageError: it has one, and ``clip_grad_value`` is asked for.
        """
        own = optimizer.clip_grad_norm if isinstance(optimizer, LimitsNorm) else None
        if own is None:
            return self.clip_grad_norm
        if self.clip_grad_value is not None:
            raise UsageError(
                f"clip_grad_value={self.clip_grad_value}: the optimizer clips by norm {own:g} itself. Leave it out, or "
                "make the optimizer with max_grad_norm=None."
            )
        return min(own, self.clip_grad_norm or own)

    @staticmethod
    def of(given: Mapping[str, Any]) -> Options:
        """Options from keyword arguments.

        Raises:
            UsageError: an unknown name (with near matches) or an impossible value.
        """
        known = [f.name for f in fields(Options)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise UsageError(f"Unknown argument {name!r}.{hint} Known: {', '.join(known)}.")
        values = dict(given)
        memory = values.get("memory")
        if isinstance(memory, str):
            values["memory"] = parse_bytes(memory)
        elif isinstance(memory, float):
            values["memory"] = int(memory)
        return Options(**values)


def parse_bytes(text: str) -> int:
    """A size such as ``24GiB`` or ``80 GB``, in byte.

    Raises:
        UsageError: no number, no unit, or an unknown one.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or unit not in BYTE_UNITS or float(match[1]) <= 0:
        raise UsageError(f"Cannot read {text!r} as a memory size. Write a number and a unit, such as 24GiB or 80GB.")
    return int(float(match[1]) * BYTE_UNITS[unit])
