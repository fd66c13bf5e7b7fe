"""Options of planning and running: the keyword arguments of `autopar.plan` and `autopar.parallelize`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, get_args, runtime_checkable

from autopar.errors import UsageError, suggest
from autopar.ir.hardware import ExecutionMode
from autopar.ir.plan_constraints import PlanConstraints, check_choice, check_positive, check_switch
from autopar.runtime.comm.protocols import CHECKPOINT_SECONDS, TransportName
from autopar.solve.space.constraints import Constraints

BYTE_UNITS: Mapping[str, int] = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


@runtime_checkable
class LimitsNorm(Protocol):
    """An optimizer callable that limits the norm of all gradients, of which each rank sees only some."""

    @property
    def clip_grad_norm(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True)
class Options(PlanConstraints):
    """Keyword arguments of `autopar.plan` and `autopar.parallelize`: constraints on the plan and settings of the run.

    Args:
        backend: gloo (CPU) or nccl (GPU).
        compile: run the stages through torch.compile; by default on GPUs.
        cuda_graph: replay whole training steps as CUDA graphs; by default on GPUs. `forward_backward`, the
            `train_step` after it, and steps under fp16 run without.
        transport: what carries tensors between the GPUs of a pipeline or of a tensor-parallel group. "symmetric" is
            peer access to symmetric memory; "auto" uses it where it can and "nccl" elsewhere.
        clip_grad_norm: largest 2-norm of all gradients together.
        clip_grad_value: largest absolute value of a gradient's element.
        timeout: longest wait for a peer inside a step, second. A first step compiles too: with ``compile=True``
            on CPU the stages compile one after the other, and a long pipeline needs a longer timeout.
        checkpoint_timeout: longest wait for a peer in a save or load of a checkpoint, second; by default an hour, or
            ``timeout`` if that is longer.

    Raises:
        UsageError: a value is impossible, or two of them contradict each other.
    """

    backend: str | None = None
    compile: bool | None = None
    cuda_graph: bool | None = None
    transport: TransportName = "auto"
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    timeout: float = 600.0
    checkpoint_timeout: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("compile", "cuda_graph"):
            check_switch(name, getattr(self, name))
        check_choice("transport", self.transport, get_args(TransportName))
        for name in ("clip_grad_norm", "clip_grad_value", "timeout", "checkpoint_timeout"):
            check_positive(name, getattr(self, name))
        if self.backend not in (None, "gloo", "nccl"):
            raise UsageError(f"backend={self.backend!r} is unknown. It is gloo (CPU) or nccl (GPU).")
        if self.clip_grad_norm is not None and self.clip_grad_value is not None:
            raise UsageError("Pass clip_grad_norm or clip_grad_value, not both.")

    def constraints(self, devices: int, batch: int) -> Constraints:
        """The constraints on a plan for so many devices and samples.

        Raises:
            UsageError: a constraint contradicts the devices or the batch.
        """
        given = {f.name: getattr(self, f.name) for f in fields(PlanConstraints)}
        return Constraints(devices, batch, peer_memory=self.transport != "nccl", **given)

    def check_machine(self, device_type: str) -> None:
        """Refuse options that devices of this type do not support.

        Raises:
            UsageError: names the option.
        """
        if device_type != "cpu":
            return
        for name, value in (("cuda_graph", self.cuda_graph), ("transport", self.transport)):
            if value not in (None, False, "auto"):
                raise UsageError(f"{name}={value!r} needs GPUs; this run has CPU processes and Gloo. Leave it out.")

    @property
    def checkpoint_seconds(self) -> float:
        """Longest wait for a peer in a save or load."""
        return self.checkpoint_timeout or max(self.timeout, CHECKPOINT_SECONDS)

    def execution_mode(self, device_type: str) -> ExecutionMode:
        """Whether programs run compiled and captured on devices of this type."""
        on_gpu = device_type == "cuda"
        return ExecutionMode(
            compiled=on_gpu if self.compile is None else self.compile,
            captured=on_gpu and self.cuda_graph is not False,
        )

    def computes_channels_last(self, device_type: str) -> bool:
        """Whether convolutions, where that suits them, compute on images in channels_last on devices of this type."""
        if self.channels_last is not None:
            return self.channels_last
        return device_type == "cuda" and self.execution_mode(device_type).compiled

    def norm_limit(self, optimizer: Any) -> float | None:
        """Limit of the global gradient norm: the smaller of ``clip_grad_norm`` and the optimizer callable's limit.

        Raises:
            UsageError: the callable has a limit and ``clip_grad_value`` is set.
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
    def of(arguments: Mapping[str, Any]) -> Options:
        """Options from keyword arguments; ``memory`` may be a text such as ``24GiB``, and ``zero`` "auto" for None.

        Raises:
            UsageError: an unknown name (with near matches) or an impossible value.
        """
        names = [f.name for f in fields(Options)]
        for name in arguments:
            if name not in names:
                raise UsageError(f"Unknown argument {name!r}.{suggest(name, names)} Known: {', '.join(names)}.")
        values = dict(arguments)
        memory = values.get("memory")
        if isinstance(memory, str):
            values["memory"] = parse_bytes(memory)
        elif isinstance(memory, float):
            values["memory"] = int(memory)
        if values.get("zero") == "auto":
            values["zero"] = None
        return Options(**values)


# Names of the options that affect the run but not the plan: allowed together with plan=.
RUN_SETTINGS = frozenset(f.name for f in fields(Options)) - {f.name for f in fields(PlanConstraints)}


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
