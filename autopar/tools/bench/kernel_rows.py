"""Kernels of a step summed by name, and both sides of the comparison summed by kind.

Kernels of a replayed CUDA graph carry no operation. Their names do say what they compute: cuBLAS, cuDNN, CUTLASS and
flash attention put the algorithm into a kernel's name, torch.compile the operations that it fused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.ir.hardware import OpKind
from autopar.ir.plan import Plan
from autopar.tools.bench.kernel_trace import ProfiledStep
from autopar.tools.bench.priced_ops import PricedGraph

KernelKind = OpKind | Literal["optimizer", "collective"]
Direction = Literal["forward", "backward", "update"]

# The first pattern that occurs in a name decides; a kernel without one only moves data.
PATTERNS: Mapping[str, KernelKind] = {
    r"nccl": "collective",
    r"multi_tensor_apply|^triton_for_": "optimizer",
    r"^triton_tem_.*(flex_)?attention": "attention",
    r"^triton_tem_.*depthwise": "depthwise",
    r"^triton_tem_.*convolution": "convolution",
    r"^triton_tem_": "matmul",
    r"^triton_|^(memcpy|memset)": "memory",  # a fused kernel may have addmm or convolution in its name, for its operand
    r"flash|fmha|sdpa|attention|mha_fwd|mha_bwd": "attention",
    r"depthwise|dwconv|conv_?dw|(conv2d|dgrad2d|wgrad2d|conv3d)_grouped_direct": "depthwise",
    r"fprop|dgrad|wgrad|implicit_?gemm|convolve|winograd|convolution|conv[123]d|conv_kernel|fft[123]d_": "convolution",
    r"gemm|nvjet|cutlass|gemv|splitk|cublas|dot_kernel|wgmma": "matmul",
}  # fmt: skip
COMPILED: Mapping[re.Pattern[str], KernelKind] = {re.compile(p, re.IGNORECASE): kind for p, kind in PATTERNS.items()}
BACKWARD = re.compile(r"backward|bwd|dgrad|wgrad|dq_dk_dv|_bprop", re.IGNORECASE)


def kernel_kind(name: str) -> KernelKind:
    """Kind of a kernel.

    Error: cuDNN's ``grouped_direct`` kernels count as depthwise; they also run other grouped convolutions. A foreach
        kernel counts as the optimizer, wherever in the step it runs.
    """
    for pattern, kind in COMPILED.items():
        if pattern.search(name):
            return kind
    return "memory"


def kernel_directions(names: Iterable[str]) -> list[Direction]:
    """Direction of each kernel of a step with one microbatch, in the order in which they started.

    The backward begins with the first kernel whose name says so: in a step, the gradient of the loss. A generated
    kernel does not begin it: one of the forward that computes what a norm's backward needs names that backward too.
    Kernels of the optimizer are the update.
    """
    directions, in_backward = list[Direction](), False
    for name in names:
        in_backward = in_backward or (not name.startswith("triton_") and BACKWARD.search(name) is not None)
        update = kernel_kind(name) == "optimizer"
        directions.append("update" if update else "backward" if in_backward else "forward")
    return directions


# Parts of a step that are no kernel: pauses of the device; kernels that run at the same time, negative; what a plan's
# step has besides its operations and its update, such as recomputed forwards.
GAP, OVERLAP, OTHER = "gap", "overlap", "other"
Kinds = Mapping[tuple[str, str], float]  # seconds of a step by kind and direction


@dataclass(frozen=True)
class KernelRow:
    """Kernels of one name, grid and direction in a step.

    Args:
        count: of a step; a mean over the profiled steps.
        seconds: of a step, summed over the kernels.
    """

    name: str
    grid: tuple[int, ...]
    kind: KernelKind
    direction: Direction
    count: float
    seconds: float


@dataclass(frozen=True)
class KindRow:
    """Priced and measured seconds of a step in one kind of kernel and direction; the direction may be empty."""

    kind: str
    direction: str
    priced_seconds: float
    measured_seconds: float

    @property
    def difference_seconds(self) -> float:
        """Measured minus priced seconds: positive where the planner is too fast."""
        return self.measured_seconds - self.priced_seconds


@dataclass(frozen=True)
class TimelineEntry:
    """One kernel of the first profiled step: index of its row, seconds since the step's first kernel, duration."""

    row: int
    start_seconds: float
    seconds: float


# -- measured ------------------------------------------------------------------------------------------------------


def kernel_rows(steps: Sequence[ProfiledStep]) -> tuple[KernelRow, ...]:
    """Kernels by name, grid and direction, the most expensive first."""
    durations: defaultdict[tuple[str, tuple[int, ...], Direction], list[float]] = defaultdict(list)
    for step in steps:
        directions = kernel_directions(kernel.name for kernel in step.kernels)
        for kernel, direction in zip(step.kernels, directions, strict=True):
            durations[kernel.name, kernel.grid, direction].append(kernel.seconds)
    rows = (
        KernelRow(name, grid, kernel_kind(name), direction, len(seconds) / len(steps), sum(seconds) / len(steps))
        for (name, grid, direction), seconds in durations.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def timeline(step: ProfiledStep, rows: Sequence[KernelRow]) -> tuple[TimelineEntry, ...]:
    """Kernels of a step in the order of their starts."""
    index = {(row.name, row.grid, row.direction): number for number, row in enumerate(rows)}
    directions, start = kernel_directions(k.name for k in step.kernels), step.kernels[0].start_seconds
    return tuple(
        TimelineEntry(index[k.name, k.grid, direction], k.start_seconds - start, k.seconds)
        for k, direction in zip(step.kernels, directions, strict=True)
    )


def measured_kinds(rows: Sequence[KernelRow], step_seconds: float, busy_seconds: float) -> Kinds:
    """Seconds of kernels by kind and direction, with the gap and the overlap; they sum to the step."""
    kinds = defaultdict[tuple[str, str], float](float)
    for row in rows:
        kinds[row.kind, row.direction] += row.seconds
    kinds[OVERLAP, ""] = busy_seconds - sum(row.seconds for row in rows)
    kinds[GAP, ""] = step_seconds - busy_seconds
    return kinds


# -- priced --------------------------------------------------------------------------------------------------------


def priced_kinds(priced: PricedGraph, plan: Plan) -> Kinds:
    """Priced seconds by kind and direction; they sum to the predicted step. Extra traffic counts as memory."""
    kinds, prediction = defaultdict[tuple[str, str], float](float), plan.prediction
    for row in priced.rows:
        kinds[row.kind, "forward"] += row.forward_seconds
        kinds[row.kind, "backward"] += row.backward_seconds
        kinds["memory", "backward"] += row.extra_traffic_seconds
    kinds["optimizer", "update"] = prediction.optimizer_seconds
    kinds[GAP, ""] = priced.pause_seconds
    kinds[OTHER, ""] = prediction.step_seconds - sum(kinds.values())
    return kinds


def kind_rows(priced: Kinds, measured: Kinds) -> tuple[KindRow, ...]:
    """A row for each kind and direction of either side, the largest difference first."""
    keys = dict.fromkeys((*priced, *measured))
    rows = (KindRow(*key, priced.get(key, 0.0), measured.get(key, 0.0)) for key in keys)
    return tuple(sorted(rows, key=lambda row: -abs(row.difference_seconds)))
