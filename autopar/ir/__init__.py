"""Every frozen type that crosses stages, its invariants and its printed form."""

from autopar.ir.batch import microbatch_factors, microbatch_size, microbatch_sizes, unlike_asked
from autopar.ir.checkpoint import Header, SavedWeight
from autopar.ir.choices import Choice, ChoiceGraph, ChoiceGroup, Conversion
from autopar.ir.cost import BUCKET_BYTES, CostGraph, Flow, Group, Holding
from autopar.ir.graph import (
    DTYPE_BYTES,
    NO_AUTOCAST,
    Graph,
    LocalDevice,
    Mode,
    Op,
    Ref,
    Value,
    Weight,
    contiguous,
    dense,
    dtype_name,
    memory_order,
    refs,
    renamed,
)
from autopar.ir.layout import (
    REPLICATED,
    TP,
    AxisSizes,
    Layout,
    Split,
    broadcast_layout,
    compressed,
    look_up,
    partial_layout,
    pattern_of,
    split_layout,
)
from autopar.ir.mesh import Mesh, Place
from autopar.ir.names import inside, unused_name
from autopar.ir.plan import (
    INTERLEAVED,
    SCHEMA_VERSION,
    Alternative,
    AskedSchedule,
    Balance,
    BlockSharding,
    Collective,
    CostSource,
    HardwareInfo,
    InputInfo,
    Message,
    ModelInfo,
    Plan,
    Precision,
    Prediction,
    PriceSource,
    Recompute,
    ScheduleName,
    SolverInfo,
    Stage,
    StageMemory,
)
from autopar.ir.program import Edge, Program, input_names

__all__ = [
    "BUCKET_BYTES", "DTYPE_BYTES", "INTERLEAVED", "NO_AUTOCAST", "REPLICATED", "SCHEMA_VERSION", "TP",
    "Alternative", "AskedSchedule", "AxisSizes", "Balance", "BlockSharding", "Choice", "ChoiceGraph", "ChoiceGroup",
    "Collective", "Conversion", "CostGraph", "CostSource", "Edge", "Flow", "Graph", "Group", "HardwareInfo", "Header",
    "Holding", "InputInfo", "Layout", "LocalDevice", "Mesh", "Message", "Mode", "ModelInfo", "Op", "Place", "Plan",
    "Precision", "Prediction", "PriceSource", "Program", "Recompute", "Ref", "SavedWeight", "ScheduleName",
    "SolverInfo", "Split", "Stage", "StageMemory", "Value", "Weight", "broadcast_layout", "compressed", "contiguous",
    "dense", "dtype_name", "input_names", "inside", "look_up", "memory_order", "microbatch_factors", "microbatch_size",
    "microbatch_sizes", "partial_layout", "pattern_of", "refs", "renamed", "split_layout", "unlike_asked",
    "unused_name",
]  # fmt: skip
