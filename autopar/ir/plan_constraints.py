"""Constraints that a caller may put on a plan: declared once, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import get_args

from autopar.errors import UsageError
from autopar.ir.plan_parts import (
    FIXED_CHUNKS,
    INTERLEAVED,
    SPLIT,
    Balance,
    CostSource,
    Precision,
    Recompute,
    ReduceDtype,
    RequestedSchedule,
    ZeroStage,
    schedules_with,
)

SCHEDULES = ("1f1b", "gpipe", *INTERLEAVED, *SPLIT, "auto")


@dataclass(frozen=True, kw_only=True)
class PlanConstraints:
    """Constraints on a plan; None leaves a choice to the planner.

    The flags of ``autopar plan`` have the names of these fields.

    Args:
        pp, tp, dp: sizes of the mesh axes; they multiply to the number of devices. A tuple for ``tp``, such as (2, 4),
            gives the sizes of several tensor axes, the outermost first: ranks of the last one are neighbours. A number
            leaves them to the planner, (8,) is a single axis.
        zero: ZeRO stage. Replicas divide among them: 0 nothing, 1 the optimizer's state, 2 that and the gradients, 3
            that and the parameters, as FSDP does; the planner then chooses the blocks that are gathered before each
            use. None, or the keyword argument "auto", takes the fastest that fits.
        dp_shard: replicas, one after the other, that divide what ZeRO says; each such group has a copy of all (hybrid
            sharding). By default all replicas, or those of a node where that is faster.
        reduce_dtype: dtype in which gradients travel between replicas. "float32" is that of main gradients (float64 in
            a float64 model). "bfloat16" halves the bytes and rounds each gradient; NCCL and Gloo round partial sums
            too, peer GPUs add in float32. Main gradients stay float32, and accumulate in it.
        chunks: stages of a rank; more than one needs an interleaved schedule, zb-v or searched.
        microbatches: per replica and step. They have one size but for the last, as torch.chunk cuts.
        microbatch_size: most samples of a microbatch.
        schedule: "auto", the default, takes the fastest of 1f1b, interleaved, interleaved-overlap, zb-h1, zb-v and
            searched that fits. All but 1f1b leave only meshes with a pipeline. The last three split backwards into
            gradients of inputs and of weights, which fill bubbles: zb-h1 with one stage a rank, zb-v with two, both in
            about the memory of 1f1b, and searched in an order for the stages' times and the memory that is left. gpipe
            takes as long as 1f1b and keeps more activations.
        balance: what the stages share evenly.
        pins: stage of an operation or of a whole module, by name.
        memory: byte per device; the cost model's by default.
        precision: the model's own by default. bf16 and fp16 compute as `torch.autocast` does. bf16-params computes all
            but batch norm with bfloat16 copies of the parameters, on bfloat16 inputs, as FSDP2's
            ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)`` does. Weights are float32 in all three.
        channels_last: whether convolutions compute on images in channels_last, whose copies plans contain. By default,
            compiled programs on GPUs do so where torch.compile would. Inputs and weights keep their format, contiguous
            results too.
        recompute: activation checkpointing. "auto" uses it only where a plan would not fit, or would be slower,
            without it. Results are the same, so this is the default.
        hardware: name or file of the cost model.
        cost: "measured" times the operations of promising plans on this device, compiled and captured as they will run,
            and keeps the times on disk (`autopar.measure.regions`). "analytic" prices operations by the cost model.
            "auto" plans by the cost model first. Where the plan's device is at hand it then times the operations whose
            errors could turn the choice, and plans again: see docs/search.md. Under a launcher
            `autopar.parallelize` measures on rank 0, and takes what rank 0's disk has.
        measure_seconds: longest time that ``cost="auto"`` takes to time operations, second; 0 for none, so that only
            times count that are on disk. By default the number in AUTOPAR_MEASURE_SECONDS, or 30 on
            GPUs and 0 on processors. A trace of the model that has begun ends first, which may take longer.
        solver_seconds: time limit for proving a bound of the cuts and finding better ones, second.

    Raises:
        UsageError: a value is impossible, or two of them contradict each other.
    """

    pp: int | None = None
    tp: int | tuple[int, ...] | None = None
    dp: int | None = None
    zero: ZeroStage | None = None
    dp_shard: int | None = None
    reduce_dtype: ReduceDtype = "float32"
    chunks: int | None = None
    microbatches: int | None = None
    microbatch_size: int | None = None
    schedule: RequestedSchedule = "auto"
    balance: Balance = "time"
    pins: Mapping[str, int] = field(default_factory=dict)
    memory: int | None = None
    precision: Precision | None = None
    channels_last: bool | None = None
    recompute: Recompute = "auto"
    hardware: str | None = None
    cost: CostSource = "auto"
    measure_seconds: float | None = None
    solver_seconds: float = 10.0

    @property
    def tp_ranks(self) -> int | None:
        """Ranks of a tensor-parallel group, if given."""
        return prod(self.tp) if isinstance(self.tp, tuple) else self.tp

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "dp_shard", "chunks", "microbatches", "microbatch_size"):
            check_whole(name, getattr(self, name))
        object.__setattr__(self, "tp", checked_tp(self.tp))
        check_zero(self.zero)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("balance", self.balance, ("time", "params", "flops", "uniform"))
        check_choice("recompute", self.recompute, ("none", "all", "auto"))
        check_choice("reduce_dtype", self.reduce_dtype, get_args(ReduceDtype))
        check_choice("cost", self.cost, get_args(CostSource))
        seconds = self.measure_seconds
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 <= seconds < inf):
            raise UsageError(f"measure_seconds={seconds!r} must be a number of seconds of at least 0.")
        if self.measure_seconds is not None and self.cost != "auto":
            takes = "measures nothing" if self.cost == "analytic" else "takes as long as it needs"
            raise UsageError(
                f"measure_seconds={self.measure_seconds:g} (--measure-seconds) is for cost='auto'; cost={self.cost!r} "
                f"{takes}. Leave one out."
            )
        if self.precision not in (None, *get_args(Precision)):
            raise UsageError(
                f"precision={self.precision!r} is unknown. It is fp32, bf16, fp16 or bf16-params for a model with "
                "float32 parameters; leave it out to compute in the model's own precision."
            )
        check_switch("channels_last", self.channels_last)
        check_positive("memory", self.memory)
        check_positive("solver_seconds", self.solver_seconds)
        if self.chunks not in (None, fixed := FIXED_CHUNKS.get(self.schedule, self.chunks)):
            raise UsageError(
                f"chunks={self.chunks} with schedule={self.schedule!r}, under which each rank has {fixed}. Use "
                f"schedule={', '.join(map(repr, schedules_with(self.chunks)))} or 'auto', or leave chunks out."
            )
        if self.schedule in SPLIT and (self.zero or 0) >= 2:
            raise UsageError(
                f"schedule={self.schedule!r} splits backwards, and zero={self.zero} reduces gradients after every "
                "backward. Use zero=1 or less, or another schedule."
            )
        if self.microbatches is not None and self.microbatch_size is not None:
            raise UsageError("Pass microbatches or microbatch_size, not both.")


MAX_TENSOR_AXES = 3


def checked_tp(tp: object) -> int | tuple[int, ...] | None:
    """The number of tensor-parallel ranks, or the sizes of their axes.

    Raises:
        UsageError: they are no whole numbers, there are too many, or one of several axes has less than 2 ranks.
    """
    if not isinstance(tp, (tuple, list)):
        check_whole("tp", tp)
        return tp  # type: ignore[return-value]
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in tp)
    if not (whole and 1 <= len(tp) <= MAX_TENSOR_AXES and min(tp) >= min(len(tp), 2)):
        raise UsageError(
            f"tp={tuple(tp)!r} must be a whole number of ranks, or the sizes of up to {MAX_TENSOR_AXES} axes of at "
            "least 2 ranks, such as (2, 2)."
        )
    return tuple(tp)


def check_whole(name: str, number: object) -> None:
    """Raise a UsageError unless a number is None or a whole number of at least 1."""
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise UsageError(f"{name}={number!r} must be a whole number of at least 1.")


def check_positive(name: str, number: object) -> None:
    """Raise a UsageError unless a number is None or above 0."""
    if number is not None and (not isinstance(number, int | float) or isinstance(number, bool) or number <= 0):
        raise UsageError(f"{name}={number!r} must be a number above 0.")


def check_switch(name: str, value: object) -> None:
    """Raise a UsageError unless a value is None, True or False."""
    if value not in (None, True, False):
        raise UsageError(f"{name}={value!r} must be True or False; leave it out to have it chosen.")


def check_zero(stage: object) -> None:
    """Raise a UsageError unless a ZeRO stage is None, 0, 1, 2 or 3."""
    if isinstance(stage, bool) or stage not in (None, *get_args(ZeroStage)):
        raise UsageError(
            f"zero={stage!r} is no ZeRO stage. It is 0, 1, 2 or 3: replicas divide nothing, the optimizer's state, "
            "the gradients too, or the parameters too; leave it out to have it chosen."
        )


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise a UsageError unless a value is one of the choices."""
    if value not in choices:
        raise UsageError(f"{name}={value!r} is unknown. It is one of {', '.join(choices)}.")
