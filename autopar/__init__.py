"""autopar: the best way to split an unmodified vision model over devices, and its training there.

>>> import autopar
>>> pm = autopar.parallelize(model, devices=4, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))
>>> pm.train_step(images, labels).loss
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.errors import (
    AssumedFiniteWarning,
    AutocastWarning,
    AutoparError,
    CheckpointError,
    DeviceMemoryError,
    EvaluationWarning,
    HardwareError,
    InfeasibleError,
    MicrobatchWarning,
    MixedSamplesWarning,
    NonFiniteLossWarning,
    PlanDependentRandomWarning,
    PlanError,
    ResumeWarning,
    TraceError,
    TrainingError,
    UnknownOpWarning,
    UnreadableDataError,
    UpdatedStateWarning,
    UsageError,
    VariantWarning,
    WorkerError,
)

if TYPE_CHECKING:
    from autopar.api.model import ParallelModel
    from autopar.api.model_source import ModelSource
    from autopar.api.parallelize import parallelize
    from autopar.api.planning.plan import plan
    from autopar.api.prepare import PreparedModule, PreparedOptimizer, prepare
    from autopar.api.step_result import StepResult
    from autopar.ir.plan import Plan
    from autopar.runtime.spec import Parameters, UpdateResult

__version__ = "0.1.0"

__all__ = [
    "AssumedFiniteWarning", "AutocastWarning", "AutoparError", "CheckpointError", "DeviceMemoryError",
    "EvaluationWarning", "HardwareError", "InfeasibleError", "MicrobatchWarning", "MixedSamplesWarning", "ModelSource",
    "NonFiniteLossWarning", "ParallelModel", "Parameters", "Plan", "PlanDependentRandomWarning", "PlanError",
    "PreparedModule", "PreparedOptimizer", "ResumeWarning", "StepResult", "TraceError", "TrainingError",
    "UnknownOpWarning", "UnreadableDataError", "UpdateResult", "UpdatedStateWarning", "UsageError", "VariantWarning",
    "WorkerError", "parallelize", "plan", "prepare",
]  # fmt: skip

# Public names that are imported at first use, so that reading a cost model needs no torch.
_HOME = {
    "ModelSource": "api.model_source", "ParallelModel": "api.model", "Parameters": "runtime.spec", "Plan": "ir.plan",
    "StepResult": "api.step_result", "UpdateResult": "runtime.spec", "parallelize": "api.parallelize",
    "plan": "api.planning.plan", "prepare": "api.prepare", "PreparedModule": "api.prepare",
    "PreparedOptimizer": "api.prepare",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(importlib.import_module(f"autopar.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
