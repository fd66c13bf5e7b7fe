"""Plain data that goes to a rank and comes back from it: its specification, step requests, step results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from autopar.ir.graph import Mode, Weight
from autopar.ir.layout import REPLICATED, AxisSizes, Layout
from autopar.ir.mesh import Mesh, Place
from autopar.ir.placement import Placement
from autopar.ir.plan_parts import ListOrder, ReduceDtype, Replicas, ZeroStage
from autopar.ir.program import Program
from autopar.ir.tensor_axes import axis_index
from autopar.runtime.comm.protocols import CHECKPOINT_SECONDS, TransportName
from autopar.runtime.engine.edges import channel_index
from autopar.runtime.engine.records import ActionTiming, StepData
from autopar.runtime.launch.torch_settings import TorchSettings
from autopar.sharding.outputs import Outputs
from autopar.sharding.tensors import local_part, whole_shape

LossOver = Literal["microbatch", "batch", "caller"]
WeightWaits = Callable[[Collection[str]], Callable[[], None] | None]
MainGradOf = Callable[[str], torch.Tensor | None]
BuildModule = Callable[
    [Program, Mapping[str, torch.Tensor], torch.device, Mapping[str, str], WeightWaits, MainGradOf], nn.Module
]


class Parameters(list[nn.Parameter]):
    """A list of parameters with their original names: the argument of the user's ``optimizer`` callable.

    `named_parameters` is a module's method too, so code that groups a model's parameters by name takes this list.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__(named.values())
        self.names: tuple[str, ...] = tuple(named)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Original name and parameter, in the model's order."""
        return zip(self.names, self, strict=True)


@dataclass(frozen=True)
class TrainingRecipe:
    """Recipe by which a model is trained, equal on all ranks.

    Args:
        loss_fn, optimizer, lr_scheduler, ema, seed: as given to `autopar.parallelize`.
        clip_grad_norm: largest global gradient norm, or None.
        clip_grad_value: largest absolute value of a gradient's element, or None.
        loss_over: whether each microbatch has a loss, the global batch has one, or the caller computes it.
    """

    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Parameters], torch.optim.Optimizer] | None = None
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    ema: Callable[[nn.Module], Any] | None = None
    seed: int = 0
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    loss_over: LossOver = "microbatch"


@dataclass(frozen=True)
class RankSpec:
    """Everything that a rank needs before it gets its weights.

    Ranks of one stage differ in ``rank`` and ``device`` alone.

    Args:
        build: makes a module of a program, its weights, a device, the communicator keys of mesh axes, the waits for
            weights that are gathered, and the access to main grads.
        compiled: whether these modules are compiled by torch.compile.
        weights: weights that this rank holds, in the model's order, with the shapes of its parts.
        storage: layout of each weight that is not simply replicated over the tensor axis.
        whole_shapes: shapes of the whole weights whose parts differ in size between shards.
        holders: for each weight on several pipeline positions, these positions in order. The first one owns it.
        zero: ZeRO stage.
        dp_shard: replicas, one after the other, that divide what ZeRO says; 0 for all.
        blocks: under ZeRO-3, the block of each trainable weight: weights that are gathered together.
        kept: under ZeRO-3, weights whose gathered values stay allocated.
        reduce_dtype: dtype in which gradients travel between replicas.
        owners: the replica that updates each trainable weight of the model, at ZeRO stages 1 and 2. At stage 3, where
            replicas share the elements of weights, only of those that are not cut. Empty without ZeRO.
        stage_edges: directed pairs of stages that exchange tensors.
        placement: where the stages lie.
        order: of a searched schedule.
        trainable: all trainable weights of the model in its order, with their whole shapes. Default: this rank's.
        autocast: low dtype of mixed precision, or None.
        transport: moves tensors between the GPUs of a pipeline in training steps.
        region: part of the model that this rank runs, for messages.
        predicted_bytes: this rank's peak by the plan.
        cuda_graph: replay training steps as CUDA graphs, on devices that have them.
        settings: torch's settings in which every command runs. Default: this process's.
        checkpoint_seconds: longest wait for another rank in a save or load.
    """

    rank: int
    mesh: Mesh
    device: str
    placement: Placement
    build: BuildModule
    weights: tuple[Weight, ...]
    holders: Mapping[str, tuple[int, ...]]
    stage_edges: tuple[tuple[int, int], ...]
    recipe: TrainingRecipe
    trainable: tuple[Weight, ...] = ()
    storage: Mapping[str, Layout] = field(default_factory=dict)
    whole_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    zero: ZeroStage = 0
    dp_shard: int = 0
    reduce_dtype: ReduceDtype = "float32"
    owners: Mapping[str, int] = field(default_factory=dict)
    blocks: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    autocast: str | None = None
    order: ListOrder | None = None
    region: str = "the whole model"
    predicted_bytes: int = 0
    cuda_graph: bool = True
    transport: TransportName = "auto"
    settings: TorchSettings = field(default_factory=TorchSettings.current)
    compiled: bool = False
    checkpoint_seconds: float = CHECKPOINT_SECONDS

    @cached_property
    def cut(self) -> frozenset[str]:
        """Trainable weights whose elements replicas share, wherever a segment ends."""
        if self.zero != 3:
            return frozenset()
        return frozenset(w.name for w in self.weights if w.requires_grad) - self.owners.keys()

    @property
    def place(self) -> Place:
        return self.mesh.place(self.rank)

    @property
    def rank_seed(self) -> int:
        """Seed of the generator for random operations without counters; equal within a tensor-parallel group."""
        return self.recipe.seed + self.place.stage * self.mesh.dp + self.place.replica

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Ranks of this rank's pipeline, by stage position."""
        return self.mesh.group(self.rank, "pp")

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the same part of the same stage, by replica."""
        return self.mesh.group(self.rank, "dp")

    @property
    def replicas(self) -> Replicas:
        return Replicas(self.mesh.dp, self.zero, self.dp_shard)

    @property
    def sharing_ranks(self) -> tuple[int, ...]:
        """The `replica_ranks` that divide among them what ZeRO says, this rank included; all of them without ZeRO."""
        count = self.replicas.group_size
        first = self.place.replica // count * count
        return self.replica_ranks[first : first + count]

    @property
    def copy_ranks(self) -> tuple[int, ...]:
        """The `replica_ranks` that update the same part of the weights as this rank, itself included."""
        count = self.replicas.group_size
        return self.replica_ranks[self.place.replica % count :: count]

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """Ranks of this tensor-parallel group, by shard."""
        return self.mesh.group(self.rank, "tp")

    @property
    def axis_index(self) -> AxisSizes:
        """This rank's number on each tensor axis."""
        return axis_index(self.mesh.axis_sizes, self.place.shard)

    @property
    def channels(self) -> tuple[tuple[int, int, int], ...]:
        """(src, dst, channel index) of all rank pairs that exchange tensors; equal on all ranks."""
        lines = [self.mesh.group(rank, "pp") for rank in self.mesh.ranks(0)]
        placement = self.placement
        at = placement.position
        return tuple(
            sorted(
                (line[at(src)], line[at(dst)], channel_index(src, dst, placement))
                for line in lines
                for src, dst in self.stage_edges
                if placement.are_apart(src, dst)
            )
        )

    @property
    def collective_groups(self) -> tuple[tuple[int, ...], ...]:
        """Rank sets of at least two that run collectives; equal on all ranks.

        They are all ranks, those of each axis of the mesh, replicas that share or have copies, and the holders of a
        tied weight.
        """
        every = range(self.mesh.devices)
        sets = {tuple(every), *(self.mesh.group(rank, axis) for rank in every for axis in (*self.mesh.axes, "tp"))}
        count = self.replicas.group_size
        for line in {self.mesh.group(rank, "dp") for rank in every}:
            sets |= {line[first : first + count] for first in range(0, len(line), count)}
            sets |= {line[first::count] for first in range(count)}
        for line in (self.mesh.group(rank, "pp") for rank in self.mesh.ranks(0)):
            sets |= {tuple(line[position] for position in positions) for positions in self.holders.values()}
        return tuple(sorted(ranks for ranks in sets if len(ranks) > 1))

    def layout(self, name: str) -> Layout:
        """Layout in which a weight is stored."""
        return self.storage.get(name, REPLICATED)

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole weight, or of a whole state in its layout, of which this rank's part has ``shape``."""
        found = self.whole_shapes.get(name)
        return found if found is not None else whole_shape(shape, self.layout(name), self.mesh.axis_sizes)

    def local_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part [*local] of a weight's whole tensor [*shape]."""
        return local_part(tensor, self.layout(name), self.mesh.axis_sizes, self.axis_index)

    def has_first_copy(self, name: str) -> bool:
        """Whether this rank holds the first copy, within its replica, of its part of a weight."""
        split = {s.axis for s in self.layout(name).splits}
        copies = (number for axis, number in self.axis_index.items() if axis not in split)
        positions = self.holders.get(name, (self.place.stage,))
        return positions[0] == self.place.stage and not any(copies)


def rank_text(mesh: Mesh, rank: int, placement: Placement) -> str:
    """``rank 3 (stage 1)``: the rank's stages, and its replica and shard where the mesh has these axes."""
    place = mesh.place(rank)
    stages = placement.stages(place.stage)
    stage = f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"
    words = [stage] if mesh.pp > 1 or mesh.dp == mesh.tp == 1 else []
    words += [f"replica {place.replica}"] if mesh.dp > 1 else []
    words += [f"shard {place.shard}"] if mesh.tp > 1 else []
    return f"rank {rank} ({', '.join(words)})"


@dataclass(frozen=True)
class StepRequest:
    """One call of a step: the model's mode, the schedule, the programs of each microbatch, and this rank's data.

    Args:
        programs: key of the programs of each microbatch, as `Rank.add_programs` got it.
        num_updates: updates before this step.
        signature: identifies shapes, dtypes and everything else of the batch but the content of tensors. Equal on all
            ranks; selects the CUDA graph.
        shape_signature: as ``signature``, of the inputs alone; selects the bound schedule.
        joined: how the outputs of all microbatches of all replicas are joined for one loss; None where each microbatch
            has its own, and without training.
        graph: number of the graph that a forward keeps for a later backward; None where the step has both or no
            backward.
    """

    mode: Mode
    schedule: str
    programs: tuple[int, ...]
    data: StepData
    training: bool
    keep_outputs: bool
    num_updates: int
    signature: tuple[int, ...] = ()
    shape_signature: tuple[int, ...] = ()
    joined: Outputs | None = None
    graph: int | None = None


@dataclass(frozen=True)
class UpdateResult:
    """Result of an update of the weights.

    ``grad_norm`` is the global 2-norm of the gradients before clipping. ``skipped``: float16 gradients overflowed
    (``grad_norm`` is infinite), the weights did not change, and the loss scale was halved.
    """

    grad_norm: float
    skipped: bool = False


@dataclass(frozen=True)
class DeviceStepResult:
    """Result of a training step on its rank's device.

    Args:
        losses: as in `StepNumbers`, [microbatches of all replicas].
        norm: global norm of the gradients, a scalar.
        outputs: flattened outputs of each microbatch, where they are kept.
        updated: whether the weights have been updated too.
    """

    losses: torch.Tensor
    norm: torch.Tensor
    outputs: list[list[Any]]
    updated: bool = False


@dataclass(frozen=True)
class StepNumbers:
    """Metrics of a training step.

    ``losses`` holds the losses of all microbatches of all replicas, in the order of the global batch, each as its part
    of the mean; equal on all ranks. ``grad_norm`` and ``skipped`` are as in `UpdateResult`, None and False without an
    update. ``device_seconds`` is the time from the step's first work on this rank's GPU to its last; None on CPU.
    """

    losses: list[float]
    grad_norm: float | None = None
    skipped: bool = False
    device_seconds: float | None = None


LazyMetrics = Callable[[], StepNumbers]  # waits for the metrics; may be called several times


@dataclass(frozen=True)
class RankStepResult:
    """Result of a training step on one rank.

    ``numbers`` are metrics, on a GPU lazy ones. ``outputs`` are the flattened outputs of this rank's microbatches,
    where the step keeps them.
    """

    numbers: StepNumbers | LazyMetrics
    outputs: list[list[Any]]


@dataclass(frozen=True)
class RankStats:
    """Measurements of a rank: compute time of each action of the last step, and the peak memory so far.

    ``peak_bytes`` is the process's resident memory on CPU, less libraries and the batch itself, and the allocator's on
    a GPU. ``optimizer_bytes`` is the optimizer's state on this rank. ``started_ns`` is the start of the first action on
    the host's clock (`time.perf_counter_ns`, one for all processes of a host). It aligns the timings of several ranks;
    on a GPU it is late by some 10 µs.
    """

    spans: tuple[ActionTiming, ...]
    peak_bytes: int
    optimizer_bytes: int
    started_ns: int = 0
