"""Torch's global settings and modes: those of a run, captured once, and a context that shuts out the caller's others.

Worker processes never see what the caller sets after `autopar.parallelize`, nor its autocast regions. Ranks, probes and
traces in the caller's process run within `TorchSettings.active`, so that they do not see it either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")
CPU = torch.device("cpu")
AUTOCAST_DTYPES = {"cpu": torch.bfloat16, "cuda": torch.float16}  # by device type: torch's defaults
CUDNN: Any = torch.backends.cudnn
MKLDNN: Any = torch.backends.mkldnn
# Backends whose ``fp32_precision`` affects float32 operations.
BACKENDS: tuple[Any, ...] = (torch.backends.cuda.matmul, CUDNN.conv, CUDNN.rnn, MKLDNN.matmul, MKLDNN.conv, MKLDNN.rnn)


@dataclass(frozen=True)
class TorchSettings:
    """Values of torch's process-wide settings that affect results.

    Args:
        float32_matmul_precision, cudnn_allow_tf32: None if ``fp32_precision`` says something that these older settings
            cannot express; torch then refuses to read them.
        fp32_precision: of each of `BACKENDS`.
    """

    default_dtype: torch.dtype
    float32_matmul_precision: str | None
    cudnn_allow_tf32: bool | None
    fp32_precision: tuple[str, ...]
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    deterministic_algorithms: bool
    deterministic_warn_only: bool

    @staticmethod
    def current() -> TorchSettings:
        """Settings of this process."""
        return TorchSettings(
            torch.get_default_dtype(),
            readable(torch.get_float32_matmul_precision),
            readable(lambda: torch.backends.cudnn.allow_tf32),
            fp32_precisions(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def apply(self) -> None:
        """Set the settings in this process."""
        torch.set_default_dtype(self.default_dtype)
        # Setting what is set already would turn "none" into "ieee", and torch.compile's cache tells these apart.
        precision, allow_tf32 = self.float32_matmul_precision, self.cudnn_allow_tf32
        if precision not in (None, readable(torch.get_float32_matmul_precision)):
            torch.set_float32_matmul_precision(precision)
        if allow_tf32 not in (None, readable(lambda: torch.backends.cudnn.allow_tf32)):
            torch.backends.cudnn.allow_tf32 = allow_tf32
        for k, (backend, precision) in enumerate(zip(BACKENDS, self.fp32_precision, strict=True)):
            if fp32_precisions()[k] != precision:
                backend.fp32_precision = "none"  # inherits that of all backends
                if fp32_precisions()[k] != precision:
                    backend.fp32_precision = precision
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        if TorchSettings.current() != self:  # the call imports torch's compiler, the longest part of a start
            torch.use_deterministic_algorithms(self.deterministic_algorithms, warn_only=self.deterministic_warn_only)

    @contextmanager
    def active(self, device: torch.device = CPU, default_device: torch.device = CPU) -> Iterator[None]:
        """Context with these settings, and without the caller's autocast, no_grad and inference mode.

        Costs about 30 µs where nothing differs, most of it for reading torch's settings.

        Args:
            device: becomes the current device if it is a GPU.
            default_device: device of tensors that are made without ``device=``.
        """
        outside = TorchSettings.current()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))  # enables gradients too
            if (autocast := AutocastState.current()) != NO_AUTOCAST:
                stack.callback(autocast.apply)
                NO_AUTOCAST.apply()
            # As `torch.get_default_device`, in a quarter of the time.
            if torch.empty(0, device=None).device != default_device:
                stack.enter_context(default_device)
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            if outside != self:
                stack.callback(outside.apply)
                self.apply()
            yield


def fp32_precisions() -> tuple[str, ...]:
    """The ``fp32_precision`` of each of `BACKENDS`; "none" stands for "ieee", the precision without any setting."""
    return tuple(["ieee" if (p := backend.fp32_precision) == "none" else p for backend in BACKENDS])


def readable(read: Callable[[], T]) -> T | None:
    """Value of a setting; None if torch refuses to read it."""
    try:
        return read()
    except RuntimeError:
        return None


@contextmanager
def without_caller_modes() -> Iterator[None]:
    """Context without the caller's autocast, no_grad and inference mode; its settings stay."""
    with TorchSettings.current().active(default_device=torch.get_default_device()):
        yield


@dataclass(frozen=True)
class AutocastState:
    """State of `torch.autocast` in a thread.

    Args:
        depth: number of regions around the current code. The outermost one empties the cache of cast weights at its
            end.
        enabled, dtypes: by device type, in the order of `AUTOCAST_DTYPES`.
    """

    depth: int
    cache_enabled: bool
    enabled: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def current() -> AutocastState:
        """State of this thread."""
        depth = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        return AutocastState(
            depth,
            torch.is_autocast_cache_enabled(),
            tuple([torch.is_autocast_enabled(device_type) for device_type in AUTOCAST_DTYPES]),
            tuple([torch.get_autocast_dtype(device_type) for device_type in AUTOCAST_DTYPES]),
        )

    def apply(self) -> None:
        """Set the state in this thread, with an empty cache.

        Regions inside of a rank then end as outermost ones do. Within an outer region they would leave their cast
        weights to the next microbatch, which would read old weights or a freed autograd graph.
        """
        torch.clear_autocast_cache()
        while (depth := torch.autocast_increment_nesting()) < self.depth:
            pass
        while depth > self.depth:
            depth = torch.autocast_decrement_nesting()
        torch.set_autocast_cache_enabled(self.cache_enabled)
        for device_type, enabled, dtype in zip(AUTOCAST_DTYPES, self.enabled, self.dtypes, strict=True):
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)


NO_AUTOCAST = AutocastState(0, True, (False, False), tuple(AUTOCAST_DTYPES.values()))
