"""Input of the cut solvers: a priced model, the stages to fill, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

from autopar.ir.comm_sizes import replica_buffer_bytes
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor
from autopar.ir.grad_buckets import NUM_GRAD_SLOTS, NUM_PARAM_SLOTS, block_groups, bucket_sizes, slot_bytes
from autopar.ir.graph import DTYPE_BYTES, Weight
from autopar.ir.hardware import Link
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, placement_of
from autopar.ir.plan_parts import (
    ONE_REPLICA,
    SPLIT,
    Balance,
    BlockSharding,
    Recompute,
    ReduceDtype,
    Replicas,
    ScheduleName,
    SolverInfo,
)
from autopar.ir.tensor_axes import TensorAxes

Axis = Literal["pp", "tp", "dp"]

# Weight of the traffic against the largest load when stages are balanced by something other than time: small enough to
# decide between equal loads only, large enough to be above the solver's tolerances.
TIE_BREAK = 1e-3

# Share of a backward that its split takes more: 1.2 % on one stage of ViT-L and -0.6 % on the other (2 x H200).
SPLIT_OVERHEAD = 0.01


@dataclass(frozen=True)
class Priced:
    """A model sharded over tensor-parallel ranks and priced: ``cost`` is of one rank.

    ``strategies`` maps operations, and ``storage`` weights, to how they are split; ``blocks`` describes that for the
    printed plan. ``strategy_index`` is the strategy chosen for each group. ``notes`` say what limits the number of
    ranks, such as ``attention has 3 heads``. ``kept`` are the blocks whose parameters stay gathered under ZeRO-3.
    """

    cost: CostGraph
    strategies: Mapping[str, str] = field(default_factory=dict)
    storage: Mapping[str, Layout] = field(default_factory=dict)
    strategy_index: tuple[int, ...] = ()
    blocks: Callable[[], tuple[BlockSharding, ...]] = tuple
    notes: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()

    @property
    def seconds(self) -> float:
        """Time of one microbatch on all stages."""
        return sum(group.seconds for group in self.cost.groups)

    @property
    def wgrad_seconds(self) -> float:
        """Part of `seconds` that split backwards leave for later."""
        return sum(group.wgrad_seconds for group in self.cost.groups)

    @property
    def collective_seconds(self) -> float:
        """Time of collectives in `seconds`."""
        return sum(group.collective_seconds for group in self.cost.groups)


class Costs(Protocol):
    """Prices that the search asks for. Implementations remember their answers."""

    def priced(
        self, axes: TensorAxes, replicas: Replicas, size: int, microbatches: int, memory_level: int
    ) -> Priced | None:
        """The model under one sharding, for ``size`` samples per microbatch.

        Args:
            memory_level: 0 for the fastest sharding, then ever smaller and slower ones.
        Returns:
            None where there is no smaller sharding.
        """
        ...

    def keeping(self, priced: Priced, axes: TensorAxes, replicas: Replicas, size: int, kept: frozenset[str]) -> Priced:
        """The model under ZeRO-3 and the same sharding, with other blocks whose parameters stay gathered."""
        ...

    def floor_seconds(self, axes: TensorAxes, size: int) -> float:
        """Lower bound of the time of one microbatch on all stages of the ranks of tensor axes; cheap to compute."""
        ...

    def bound_seconds(self, axes: TensorAxes, size: int) -> float:
        """As `floor_seconds`, over all shardings by the prices of their single strategies, which `priced` may undercut
        where kernels fuse differently; dearer than that and cheaper than `priced`.

        On several axes only over those of the innermost one.
        """
        ...

    def proven_seconds(self, axes: TensorAxes, size: int) -> float:
        """As `bound_seconds`, but no higher than `priced` under any sharding."""
        ...


@dataclass(frozen=True)
class CutProblem:
    """Assignment problem: which stage runs which group of ``cost``.

    ``boundary[s]`` is the link from stage s to s + 1. ``in_flight[s]`` is the largest number of microbatches whose
    activations stage s holds. Every stage has ``tp`` ranks of each of the ``replicas``, and ``cost`` is the cost of one
    rank. ``pins`` fixes groups to stages. ``gap`` is the relative distance from the optimum at which the solver may
    stop.

    With several ``chunks`` each rank has that many stages (`Placement`), which share its capacity.
    ``in_flight_profiles[p]`` lists the numbers of microbatches that the stages of position p hold simultaneously, for
    every moment that may be the peak; ``in_flight`` is then the first of them.

    ``peers`` are the axes along which ranks reach each other's memory. ``input_bytes`` are a step's inputs on the first
    stage, ``reserve_bytes`` the memory of libraries on every rank. ``reduce_dtype`` is the dtype in which gradients
    travel between replicas.

    ``tp_axes`` are as in `Mesh`. With ``recompute`` "auto" a stage recomputes as many of its first segments as it takes
    to fit. With "all" ``cost`` says which segments recompute.
    """

    cost: CostGraph
    stages: int
    microbatches: int
    capacity_bytes: int | None
    in_flight: tuple[int, ...]
    boundary: tuple[Link, ...]
    balance: Balance = "time"
    pins: Mapping[int, int] = field(default_factory=dict)
    time_limit_seconds: float = 60.0
    gap: float = 1e-3
    tp: int = 1
    replicas: Replicas = ONE_REPLICA
    tp_axes: tuple[int, ...] = ()
    recompute: Recompute = "none"
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    in_flight_profiles: tuple[tuple[tuple[int, ...], ...], ...] = ()
    peers: frozenset[Axis] = frozenset()
    input_bytes: int = 0
    reserve_bytes: int = 0
    reduce_dtype: ReduceDtype = "float32"

    @cached_property
    def interval_key(self) -> tuple[Hashable, ...]:
        """Key of the costs of intervals of one cost graph; see `intervals.intervals_of`."""
        return self.has_buckets, self.gradients_come, self.microbatches > 1, self.kept_received, self.is_split

    @cached_property
    def stage_costs(self) -> dict[tuple[Hashable, ...], Any]:
        """Costs of intervals that were asked for, by the arguments of `evaluate.interval_cost`.

        Problems that differ in nothing that these depend on share them.
        """
        own = self.interval_key, self.boundary, self.in_flight, self.balance
        return self.cost.remember(("stage costs", *own), dict)

    @cached_property
    def hops(self) -> dict[tuple[int, int], Link]:
        """Links between stages that were asked for."""
        return {}

    @cached_property
    def recomputing(self) -> CutProblem:
        """This problem with every stage recomputing."""
        return replace(self, cost=self.cost.recomputed, recompute="all")

    def recomputing_below(self, segment: int) -> CutProblem:
        """This problem with the segments below a number recomputing, on every stage."""
        if segment not in self._recomputing:
            self._recomputing[segment] = replace(self, cost=self.cost.recomputed_up_to(segment), recompute="all")
        return self._recomputing[segment]

    @cached_property
    def _recomputing(self) -> dict[int, CutProblem]:
        return {}

    @property
    def is_split(self) -> bool:
        """Whether backwards leave the gradients of weights for later."""
        return self.schedule in SPLIT

    def backward_seconds(self, group: Group) -> float:
        """Seconds of a group's backward, in both halves where backwards are split."""
        return group.backward_seconds * (1 + SPLIT_OVERHEAD * self.is_split)

    @property
    def pp(self) -> int:
        """Positions in the pipeline."""
        return self.stages // self.chunks

    def stages_at(self, position: int) -> tuple[int, ...]:
        """The stages that each rank at a position runs."""
        return self.placement.stages(position)

    @cached_property
    def placement(self) -> Placement:
        """Where the stages lie."""
        return placement_of(self.schedule, self.pp, self.chunks)

    def capacity_share(self, stage: int) -> float:
        """Share of its rank's capacity that a stage may use: its share of the microbatches that the rank holds."""
        return self.in_flight[stage] / sum(self.in_flight[s] for s in self.stages_at(self.placement.position(stage)))

    @property
    def may_recompute(self) -> bool:
        """Whether the solver chooses which stages recompute; without a memory limit none does."""
        return self.recompute == "auto" and self.capacity_bytes is not None

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.pp, self.tp, self.replicas.dp, self.tp_axes)

    @property
    def tensor_axes(self) -> TensorAxes:
        return self.mesh.tensor_axes

    @cached_property
    def has_buckets(self) -> bool:
        """Whether gradients accumulate in flat buckets that stay allocated between steps.

        That is so with several stages, with replicas, and with low-precision compute parameters.
        """
        return self.pp > 1 or self.replicas.dp > 1 or any(w.copy_bytes and w.gradient_bytes for w in self.cost.weights)

    @cached_property
    def gradients_come(self) -> bool:
        """Whether gradients are allocated by the step's only backward, one after the other."""
        trained = any(w.gradient_bytes for w in self.cost.weights)
        return trained and not self.has_buckets and self.microbatches == 1

    @property
    def kept_received(self) -> int:
        """Received tensors per microbatch in flight: 1, or 0 where peers write into buffers that are counted apart."""
        return 0 if "pp" in self.peers else 1

    @property
    def places(self) -> int:
        """Slots per message in the memory that peers write into: one for every microbatch, or none."""
        return self.microbatches if "pp" in self.peers else 0

    @cached_property
    def bucket_sizes(self) -> list[int]:
        """Bytes of each bucket of gradients, if one rank held the whole model."""
        if self.replicas.zero == 3:
            return [DTYPE_BYTES["float32"] * sum(w.numel for w in bucket) for bucket in self.block_buckets]
        owners = self.replicas.sharing
        return self.cost.remember(("bucket sizes", owners), lambda: bucket_sizes(self._trained_weights(), owners))

    def _trained_weights(self) -> list[Weight]:
        """Trained weights, as far as buckets depend on them."""
        stored, size = "float32", DTYPE_BYTES["float32"]
        return [
            Weight(w.name, "parameter", (w.gradient_bytes // size,), "bfloat16" if w.copy_bytes else stored,
                   requires_grad=True, master=stored if w.copy_bytes else "")
            for w in self.cost.weights
            if w.gradient_bytes
        ]  # fmt: skip

    @cached_property
    def gathered(self) -> frozenset[str]:
        """Names of the weights that replicas gather before each use."""
        return frozenset(w.name for w in self.cost.weights if w.is_gathered)

    @property
    def block_buckets(self) -> list[list[Weight]]:
        """Weights of each bucket under ZeRO-3, if one rank held the whole model."""
        blocks = {w.name: w.block for w in self.cost.weights}
        return self.cost.remember(
            "block buckets", lambda: block_groups(self._trained_weights(), blocks, lambda w: w.name in self.gathered)
        )

    @property
    def param_slot_bytes(self) -> int:
        """Bytes of the slots into which parameters are gathered under ZeRO-3, on each rank.

        Error: high on stages without the model's largest block; low where a program reads several blocks at a time.
        """
        sizes = [sum(w.num_bytes for w in bucket) for bucket in self.block_buckets if bucket[0].name in self.gathered]
        return max(sizes, default=0) * min(NUM_PARAM_SLOTS, len(sizes))

    @cached_property
    def exchanged_bytes(self) -> int:
        """Bytes through which replicas exchange gradients, on each rank: a symmetric buffer on peers, the flat buffers
        in which buckets take turns from ZeRO-2 on, those of parameters, and those for another dtype on the way.

        Error: high on stages without the model's largest bucket.
        """
        if self.replicas.dp == 1 or not self.bucket_sizes:
            return 0
        zero, largest = self.replicas.zero, max(self.bucket_sizes)
        share = DTYPE_BYTES[self.reduce_dtype] / DTYPE_BYTES["float32"]
        # Under ZeRO, weights are gathered through the symmetric buffer too.
        through = int(largest * (1 if zero else share))
        peers = replica_buffer_bytes(through, self.replicas.group_size) if "dp" in self.peers else 0
        rounded = int(largest * share) * min(NUM_GRAD_SLOTS, len(self.bucket_sizes)) if share < 1 else 0
        slots = slot_bytes(self.bucket_sizes) if zero >= 2 else 0
        return peers + rounded + slots + (self.param_slot_bytes if zero == 3 else 0)

    def fixed_bytes(self, stage: int) -> int:
        """Bytes of a stage that do not depend on its groups: inputs and, on a rank's first stage, the replicas' buffers
        and the libraries."""
        return self.input_bytes * (stage == 0) + (self.exchanged_bytes + self.reserve_bytes) * (stage < self.pp)

    def standing_bytes(self, weight: ResidentTensor) -> int:
        """Bytes of a weight that are allocated before the step's last backward."""
        return weight.num_bytes - weight.gradient_bytes * self.gradients_come

    def __post_init__(self) -> None:
        assert self.stages >= 1 and self.microbatches >= 1
        assert self.stages % self.chunks == 0 and len(self.in_flight_profiles) == (self.pp if self.chunks > 1 else 0)
        assert len(self.in_flight) == self.stages, "one in_flight per stage"
        assert len(self.boundary) == self.stages - 1, "one link between neighbouring stages"
        assert all(0 <= group < self.cost.loss for group in self.pins), "a pinned group does not exist"
        assert all(0 <= stage < self.stages for stage in self.pins.values()), "a pin's stage does not exist"


@dataclass(frozen=True)
class Cuts:
    """The stage of every group, and a proven lower bound of what the solver minimises: the simulated step for balance
    "time", otherwise the largest load, expressed as its share of the compute time."""

    stage_of: tuple[int, ...]
    seconds: float
    bound_seconds: float
    solver: SolverInfo


@dataclass(frozen=True)
class Objective:
    """Coefficients of what is minimised.

    With load_s the balanced quantity of stage s and x_s the transfer time of the boundary after it:
    t_s = load_s + transfer · x_s, and the value is slowest · max t_s + total · Σ t_s + traffic · Σ x_s
    + optimizer · max (`update_seconds`).
    """

    slowest: float
    total: float
    transfer: float
    traffic: float
    optimizer: float


def objective_of(problem: CutProblem) -> Objective:
    """Coefficients of the objective for the problem's balance.

    Source: a 1F1B or GPipe step of m microbatches takes (m − 1) · max t + Σ t; see `slowest_count`.
    """
    if problem.balance == "time":
        slowest = slowest_count(problem.microbatches, problem.pp, problem.chunks)
        return Objective(slowest=slowest, total=1.0, transfer=1.0, traffic=0.0, optimizer=1.0)
    return Objective(slowest=1.0, total=0.0, transfer=0.0, traffic=TIE_BREAK, optimizer=0.0)


def slowest_count(microbatches: float, pp: int, chunks: int) -> float:
    """Number of times that the slowest stage counts in a step, besides each stage once: m − 1 with one chunk a rank.

    Source: interleaved 1F1B with v equal chunks on each of p ranks keeps a rank busy for v · m of them and idle for
        p − 1, or for m < p the other way around: the first passes v · p and m − 1 follow. So the step is
        v · max(m, p) + min(m, p) − 1 of p · v equal stages.
    Error: with v > 1 and unequal stages a model of the step, which the simulated schedule may exceed or undercut.
    """
    return chunks * max(microbatches, pp) + min(microbatches, pp) - 1 - pp * chunks


def group_loads(cost: CostGraph, balance: Balance) -> tuple[float, ...]:
    """Load that each group adds to its stage, in seconds.

    Parameters, FLOPs and layer counts are scaled so that all loads sum to the compute time of a microbatch; a
    parameter that several groups share counts for the first of them.
    """
    seconds = tuple(group.seconds for group in cost.groups)
    if balance == "time":
        return seconds
    raw = [0.0] * len(cost.groups)
    if balance == "flops":
        raw = [group.flops for group in cost.groups]
    for holding in cost.weights:
        first = holding.groups[0]
        if balance == "params":
            raw[first] += holding.numel
        elif balance == "uniform" and holding.numel:
            raw[first] = 1.0
    scale = (sum(seconds) or 1.0) / (sum(raw) or 1.0)
    return tuple(scale * r for r in raw)


def update_seconds(weight: ResidentTensor) -> float:
    """Time that a weight adds to its stage's update: its optimizer and the whole reduction of its gradient.

    Error: high by the part of the reduction that the last backward hides, which only a simulated step knows. Last
    backwards are about equally long on all stages, so the comparison of stages is not affected.
    """
    return weight.optimizer_seconds + weight.reduce_seconds + weight.gather_seconds
