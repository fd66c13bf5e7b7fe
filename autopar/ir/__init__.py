"""Every frozen type that crosses stages, its invariants and its printed form."""

from autopar.ir.cost import CostGraph, Flow, Group, Holding
from autopar.ir.graph import DTYPE_BYTES, Graph, LocalDevice, Mode, Op, Ref, Value, Weight, refs
from autopar.ir.plan import (
    SCHEMA_VERSION,
    Alternative,
    Balance,
    HardwareInfo,
    InputInfo,
    Mesh,
    ModelInfo,
    Plan,
    Precision,
    Prediction,
    ScheduleName,
    SolverInfo,
    Stage,
)
from autopar.ir.program import Edge, Program

__all__ = [
    "DTYPE_BYTES", "SCHEMA_VERSION", "Alternative", "Balance", "CostGraph", "Edge", "Flow", "Graph", "Group",
    "HardwareInfo", "Holding", "InputInfo", "LocalDevice", "Mesh", "Mode", "ModelInfo", "Op", "Plan", "Precision",
    "Prediction",
    "Program", "Ref", "ScheduleName", "SolverInfo", "Stage", "Value", "Weight", "refs",
]  # fmt: skip
