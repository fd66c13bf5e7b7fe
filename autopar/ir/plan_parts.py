"""Records that a plan consists of, and read access to a whole plan for the modules that check and print it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, get_args

from pydantic import SkipValidation, with_config

from autopar.ir.mesh import STRICT, Mesh
from autopar.ir.placement import Placement

ScheduleName = Literal[
    "forward-only", "gpipe", "1f1b", "interleaved", "interleaved-overlap", "zb-h1", "zb-v", "searched"
]
# Schedules of a training step that allow several chunks per rank, the one that keeps the fewest activations first.
INTERLEAVED: tuple[ScheduleName, ...] = ("interleaved", "interleaved-overlap")
# Schedules whose backwards are split into gradients of inputs and of weights.
SPLIT: tuple[ScheduleName, ...] = ("zb-h1", "zb-v", "searched")
# Schedules that fix the number of chunks per rank; the others allow any.
FIXED_CHUNKS: Mapping[str, int] = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-v": 2}
# Schedules that are for pipelines alone.
OF_PIPELINES: tuple[ScheduleName, ...] = (*INTERLEAVED, *SPLIT)
RequestedSchedule = ScheduleName | Literal["auto"]
Precision = Literal["fp32", "fp64", "bf16", "fp16", "bf16-params"]
Balance = Literal["time", "params", "flops", "uniform"]
Recompute = Literal["none", "all", "auto"]  # as requested
StageRecompute = Literal["none", "all"] | int  # a number of segments
ReduceDtype = Literal["float32", "bfloat16"]  # in which gradients travel between replicas
ZeroStage = Literal[0, 1, 2, 3]  # what replicas divide: nothing, optimizer state, gradients too, parameters too
BlockParams = Literal["gathered", "kept"]  # before each use, or once a step
PriceSource = Literal["analytic", "measured", "mixed"]  # mixed: some operations were timed
COMMUNICATION = ("links", "network", "overlap")  # names of parts of a step
TIMED = "timed operations"  # part of a step of mixed prices
Basis = Literal["steps", "measured", "assumed"]
CostSource = Literal["analytic", "measured", "auto"]  # as requested
ONE_DEVICE = "one device"  # label of the alternative that runs the whole batch on one


def schedules_with(chunks: int) -> tuple[ScheduleName, ...]:
    """Schedules of a training step under which a rank may have so many chunks."""
    names: tuple[ScheduleName, ...] = get_args(ScheduleName)
    return tuple(n for n in names if n != "forward-only" and FIXED_CHUNKS.get(n, chunks) == chunks)


@dataclass(frozen=True)
class Replicas:
    """Data-parallel replicas, and what they divide among them.

    Args:
        dp: replicas.
        zero: ZeRO stage.
        dp_shard: replicas, one after the other, that divide; each such group has a copy of all (hybrid sharding). 0 for
            all of them.
    """

    dp: int = 1
    zero: ZeroStage = 0
    dp_shard: int = 0

    @property
    def sharing(self) -> int:
        """Replicas that divide optimizer state: 1 without ZeRO."""
        return (self.dp_shard or self.dp) if self.zero else 1

    @property
    def group_size(self) -> int:
        """Replicas that reduce gradients with each other: those that divide, or without ZeRO all."""
        return self.dp_shard or self.dp

    @property
    def copies(self) -> int:
        """Replicas that update the same part of the weights."""
        return self.dp // self.sharing

    @property
    def stage_text(self) -> str:
        """``3 over 8``: the ZeRO stage, and the number of replicas that divide where these are not all."""
        return f"{self.zero}{f' over {self.dp_shard}' if self.dp_shard else ''}"

    @property
    def zero_text(self) -> str:
        """``ZeRO-3 over 8``; empty at stage 0."""
        return f"ZeRO-{self.stage_text}" if self.zero else ""


ONE_REPLICA = Replicas()


@with_config(STRICT)
@dataclass(frozen=True)
class ListOrder:
    """Input of list scheduling (`autopar.schedule.list_schedule`), from which a searched schedule is made.

    Args:
        forward, input_grad, wgrad: nanoseconds of an action, per chunk of the pipeline.
        hop: nanoseconds in which a tensor reaches the next chunk.
        max_in_flight: per rank, the most (chunk, microbatch) pairs whose activations it keeps.
        alternates: whether a forward that is ready comes before further gradients of inputs, and gradients of weights
            fill every wait. Otherwise gradients of inputs come first, and half of a weight's must fit into a wait.
    """

    forward: tuple[int, ...]
    input_grad: tuple[int, ...]
    wgrad: tuple[int, ...]
    hop: int
    max_in_flight: tuple[int, ...]
    alternates: bool = True


@with_config(STRICT)
@dataclass(frozen=True)
class InputInfo:
    """One model input, its shape at the global batch."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@with_config(STRICT)
@dataclass(frozen=True)
class ModelInfo:
    """The model that the plan is for. ``fingerprint`` must equal the traced graph's."""

    name: str
    fingerprint: str
    num_params: int
    inputs: tuple[InputInfo, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@with_config(STRICT)
@dataclass(frozen=True)
class StageMemory:
    """Memory of a stage on each of its ranks.

    Args:
        weight_bytes: weights, gradients and optimizer state, allocated all the time.
        microbatch_bytes: activations of one microbatch, from its forward to its backward.
        transient_bytes: memory while the stage runs, 0 where another stage of the rank needs more. With one microbatch
            it includes gradients that exist only during the backward.
        buffer_bytes: on GPUs, the inputs of a step, symmetric memory and memory of libraries, allocated all the time.
    """

    weight_bytes: int
    microbatch_bytes: int
    transient_bytes: int
    buffer_bytes: int = 0


@with_config(STRICT)
@dataclass(frozen=True)
class Stage:
    """One pipeline stage: every operation from ``first`` to ``last`` in execution order, on ``ranks``.

    Args:
        params: whole parameters, however they are sharded.
        forward_seconds, backward_seconds: per microbatch on one rank, collectives included.
        send_bytes: sent forward to later stages, per microbatch and rank.
        recompute: "all", or the number of the stage's first segments (`autopar.cost.groups.recompute_segments`) that
            run again in the backward. Of these only the inputs are kept. The last segments are left out first: their
            backward runs while memory is fullest.
        collective_seconds: collectives of forward and backward: of tensor-parallel ranks, and of sharded parameters
            (ZeRO-3) what compute does not hide.
        optimizer_seconds: the update, once a step.
        memory: None in plans made by hand.
        num_segments: segments of the stage; 0 in plans made by hand.
        recompute_seconds: part of ``backward_seconds`` that runs forwards again.
        wgrad_seconds: part of ``backward_seconds`` that computes gradients of weights and that a split backward leaves
            for later.
    """

    first: str
    last: str
    ranks: tuple[int, ...]
    params: int
    forward_seconds: float
    backward_seconds: float
    send_bytes: int
    peak_bytes: int
    recompute: Annotated[StageRecompute, SkipValidation] = "none"  # checked with the plan's invariants
    collective_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    memory: StageMemory | None = None
    num_segments: int = 0
    recompute_seconds: float = 0.0
    wgrad_seconds: float = 0.0

    @property
    def recompute_text(self) -> str:
        """``none``, ``all``, ``12 of 40``, or ``first 12`` where the number of segments is unknown."""
        if not isinstance(self.recompute, int):
            return self.recompute
        return f"{self.recompute} of {self.num_segments}" if self.num_segments else f"first {self.recompute}"


def recomputing_text(stages: Sequence[Stage]) -> str:
    """Stages that recompute: ``stages 0, 1 (12 of 40 segments)``; empty if none does."""
    numbers = [
        f"{i}" if stage.recompute == "all" else f"{i} ({stage.recompute_text} segments)"
        for i, stage in enumerate(stages)
        if stage.recompute != "none"
    ]
    return f"stages {', '.join(numbers)}" if numbers else ""


@with_config(STRICT)
@dataclass(frozen=True)
class Message:
    """A tensor transfer per microbatch, straight from stage ``src`` to stage ``dst``.

    Activations go to a later stage, gradients to an earlier one.
    """

    src: int
    dst: int
    num_bytes: int
    seconds: float


@with_config(STRICT)
@dataclass(frozen=True)
class StepPart:
    """A part of a step whose price may be off: a kind of operations, or a kind of communication.

    Args:
        name: as in `autopar.cost.hardware.worse`.
        error: share of the step by which the part may be off.
        basis: of the numbers that the part is priced by: measured steps, measurements of single operations, or
            assumptions.
    """

    name: str
    error: float
    basis: Basis


@with_config(STRICT)
@dataclass(frozen=True)
class Prediction:
    """Predicted cost of one training step.

    The step is the pipeline, then the exposed gradient reduction over replicas, then the optimizer and what follows it.

    Args:
        peak_bytes: one entry per rank.
        error: relative error of the step; nine of ten measured steps were within it (`autopar.api.planning`).
        parts: parts of the step that the error is from; empty in plans made by hand and in older files.
        reduce_seconds: exposed gradient reduction.
        port_seconds: for which the busiest port between nodes is in use during the pipeline, which takes at least as
            long; 0 without a pipeline over nodes.
    """

    step_seconds: float
    samples_per_second: float
    bubble_fraction: float
    peak_bytes: tuple[int, ...]
    error: float = 0.0
    reduce_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    port_seconds: float = 0.0
    parts: tuple[StepPart, ...] = ()


@with_config(STRICT)
@dataclass(frozen=True)
class Collective:
    """A tensor-parallel collective of a repeated block; one record for each time it runs for one microbatch.

    Args:
        op: operation that it belongs to, as a pattern.
        axis: tensor axis; empty where there is one.
    """

    op: str
    kind: str
    direction: Literal["forward", "backward"]
    num_bytes: int
    seconds: float
    axis: str = ""


@with_config(STRICT)
@dataclass(frozen=True)
class BlockSharding:
    """The sharding of one block of the model, for people: ``name`` is a pattern that ``count`` blocks fit.

    ``rows`` maps modules to their sharding as text, such as ``rows by head / 2``.
    """

    name: str
    count: int
    rows: Mapping[str, str]
    collectives: tuple[Collective, ...] = ()


@with_config(STRICT)
@dataclass(frozen=True)
class BlockCost:
    """Part of a block of the model on one stage, for pictures.

    Args:
        name: of a module, or of an operation outside of modules (`autopar.ir.blocks.picture_blocks`).
        params: parameters; one that several blocks of a stage read counts for the first of them.
        forward_seconds, backward_seconds: per microbatch on one rank, collectives and recomputation included.
    """

    name: str
    stage: int
    params: int
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        """Forward and backward time."""
        return self.forward_seconds + self.backward_seconds


@with_config(STRICT)
@dataclass(frozen=True)
class OtherMeshes:
    """Proof about the meshes that a plan does not have.

    Args:
        num_slower: meshes with a proven bound that is not below the plan's step.
        num_open: all others; the search gave them up by estimates of their steps, or because they do not fit.
        bound_seconds: no other mesh has a shorter step; None where one of them has no proven bound.
    """

    num_slower: int
    num_open: int
    bound_seconds: float | None


@with_config(STRICT)
@dataclass(frozen=True)
class Measuring:
    """Record of ``cost="auto"`` on the device at hand, which times regions whose errors could turn the choice.

    Args:
        num_regions: regions that could turn the choice, and all others of the plans that it was between; 0 where no
            error could.
        num_timed: regions with times.
        num_earlier: regions with times of earlier plans.
        seconds: taken by timing, of ``budget_seconds``.
        before: the cost model's choice, such as ``pp 1 × tp 1 × dp 4, m 1``.
        after: the choice with the times.
        has_rivals: whether any other plan fits.
    """

    num_regions: int
    num_timed: int
    num_earlier: int
    seconds: float
    budget_seconds: float
    before: str
    after: str
    has_rivals: bool = True


@with_config(STRICT)
@dataclass(frozen=True)
class SolverInfo:
    """Record of the search that found the plan.

    Args:
        gap: (step − bound) / step of the simulated step, with the bound of all contiguous cuts in the orders that were
            searched and, where tensors are sharded, of all shardings unless operations were timed; of the largest load
            for other balances.
        method: what the gap is proven over: "cuts", "shardings", or "shardings then cuts".
        other_meshes: None in older files, where no other mesh is allowed, and where operations were timed, whose times
            for other meshes are estimates.
        measuring: None in older files, and where nothing may be timed.
    """

    name: str
    status: str
    gap: float
    seconds: float
    balance: Balance = "time"
    method: str = "cuts"
    other_meshes: OtherMeshes | None = None
    measuring: Measuring | None = None


@with_config(STRICT)
@dataclass(frozen=True)
class Alternative:
    """A plan that was considered and not chosen.

    Args:
        step_seconds: None where the plan does not fit.
        microbatches: per replica, of an alternative with the chosen mesh and schedule; None for others and in older
            files.
        peak_bytes: memory of the fullest rank; None where the plan does not fit, and in older files.
    """

    label: str
    step_seconds: float | None
    note: str = ""
    microbatches: int | None = None
    peak_bytes: int | None = None


@with_config(STRICT)
@dataclass(frozen=True)
class HardwareInfo:
    """The machine that the plan was priced for, and whether all or some of the operations were timed on it."""

    name: str
    device: str
    link: str
    memory_bytes: int
    cost: PriceSource = "analytic"
    device_type: str = "cpu"


def replica_text(plan: PlanView) -> str:
    """``, ZeRO-1, gradients reduced in bfloat16``, after a mesh; empty without replicas and at stage 0 in float32."""
    words = [plan.replicas.zero_text] if plan.zero else []
    if plan.mesh.dp > 1 and plan.reduce_dtype != "float32":
        words.append(f"gradients reduced in {plan.reduce_dtype}")
    return "".join(f", {word}" for word in words)


class PlanView(Protocol):
    """Fields of `autopar.ir.plan.Plan`, which imports the modules that read them."""

    @property
    def model(self) -> ModelInfo: ...
    @property
    def batch(self) -> int: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def schedule(self) -> ScheduleName: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def stages(self) -> tuple[Stage, ...]: ...
    @property
    def prediction(self) -> Prediction: ...
    @property
    def solver(self) -> SolverInfo: ...
    @property
    def hardware(self) -> HardwareInfo: ...
    @property
    def chunks(self) -> int: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def order(self) -> ListOrder | None: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def exceptions(self) -> Mapping[str, int]: ...
    @property
    def shardings(self) -> Mapping[str, str]: ...
    @property
    def strategies(self) -> Mapping[str, str]: ...
    @property
    def zero(self) -> ZeroStage: ...
    @property
    def param_blocks(self) -> Mapping[str, BlockParams]: ...
    @property
    def dp_shard(self) -> int: ...
    @property
    def replicas(self) -> Replicas: ...
    @property
    def reduce_dtype(self) -> ReduceDtype: ...
    @property
    def channels_last(self) -> bool: ...
    @property
    def blocks(self) -> tuple[BlockSharding, ...]: ...
    @property
    def block_costs(self) -> tuple[BlockCost, ...]: ...
    @property
    def alternatives(self) -> tuple[Alternative, ...]: ...
    @property
    def bound_by(self) -> str: ...
    @property
    def messages(self) -> tuple[Message, ...]: ...
