"""Process-wide torch settings that affect numerical results, carried from the caller to its workers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TorchSettings:
    """Values of torch's global settings in the caller."""

    default_dtype: torch.dtype
    float32_matmul_precision: str
    cudnn_allow_tf32: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    deterministic_algorithms: bool
    deterministic_warn_only: bool

    @staticmethod
    def current() -> TorchSettings:
        """Settings of this process."""
        return TorchSettings(
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def apply(self) -> None:
        """Set the settings in this process."""
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.float32_matmul_precision)
        torch.backends.cudnn.allow_tf32 = self.cudnn_allow_tf32
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        if TorchSettings.current() != self:  # the call imports torch's compiler, the longest part of a start
            torch.use_deterministic_algorithms(self.deterministic_algorithms, warn_only=self.deterministic_warn_only)
