"""What a rank is told, and what it tells: plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.ir.graph import Mode, Weight
from autopar.ir.layout import REPLICATED, TP, Layout
from autopar.ir.mesh import Mesh, Place
from autopar.ir.program import Program
from autopar.runtime.comm.protocols import TransportName
from autopar.runtime.engine.executor import ActionTiming, StepData, channel_index

WeightWaits = Mapping[str, Callable[[], None]]
MainGradOf = Callable[[str], torch.Tensor | None]
BuildModule = Callable[
    [Program, Mapping[str, torch.Tensor], torch.device, Mapping[str, str], WeightWaits, MainGradOf], nn.Module
]


class Parameters(list[nn.Parameter]):
    """What an optimizer is made from: a list of parameters that knows their original names.

    `named_parameters` is that of a module, so that code which groups a model's parameters by name takes this instead.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__(named.values())
        self.names = tuple(named)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Original name and parameter, in the model's order."""
        return zip(self.names, self, strict=True)


@dataclass(frozen=True)
class RankSpec:
    """What a rank needs to know before it is given weights; the same for all ranks of a stage but for ``rank`` and
    ``device``.

    Args:
        build: turns a program, its weights, a device, the keys of mesh axes, what waits for weights that are under way
            and what gives the sums of their gradients into a module.
        weights: the weights this rank holds, in the model's order, with the shapes of its parts.
        storage: the layout of every weight that is not simply replicated over the tensor axis.
        holders: for every weight held at several positions of the pipeline, those in order; the first one owns it.
        owners: under ZeRO-1, the replica that updates each trainable weight of the model; else empty.
        edges: every directed pair of stages that exchanges tensors.
        chunks: how many stages each rank has.
        loss_fn, optimizer, lr_scheduler: as given to `autopar.parallelize`.
        trainable: every trainable weight of the model, in its order, with its whole shape; by default those held here.
        clip_grad_norm: largest global gradient norm, or None.
        clip_grad_value: largest absolute value of a gradient's element, or None.
        ema: makes the object that averages weights, as given to `autopar.parallelize`.
        autocast: the low dtype of mixed precision, or None.
        transport: what carries tensors between the GPUs of a pipeline in training steps.
        region: the part of the model that this rank runs, for messages.
        predicted_bytes: the peak that the plan expects of this rank.
        cuda_graph: replay training steps as CUDA graphs, where the device is one that has them.
    """

    rank: int
    mesh: Mesh
    device: str
    build: BuildModule
    weights: tuple[Weight, ...]
    holders: Mapping[str, tuple[int, ...]]
    stage_edges: tuple[tuple[int, int], ...]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Parameters], torch.optim.Optimizer] | None = None
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip_grad_norm: float | None = None
    seed: int = 0
    clip_grad_value: float | None = None
    ema: Callable[[nn.Module], Any] | None = None
    trainable: tuple[Weight, ...] = ()
    storage: Mapping[str, Layout] = field(default_factory=dict)
    owners: Mapping[str, int] = field(default_factory=dict)
    autocast: str | None = None
    chunks: int = 1
    region: str = "the whole model"
    predicted_bytes: int = 0
    cuda_graph: bool = True
    transport: TransportName = "auto"

    @property
    def place(self) -> Place:
        return self.mesh.place(self.rank)

    @property
    def rank_seed(self) -> int:
        """Seed of what this rank draws without counters; one for a tensor-parallel group, whose ranks draw alike."""
        return self.seed + self.place.stage * self.mesh.dp + self.place.replica

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """The rank at each position that this rank exchanges tensors with: those of its replica and shard."""
        return pipeline_ranks(self.mesh, self.place)

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """The ranks that hold the same part of the same stage, by replica."""
        return replica_ranks(self.mesh, self.place)

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """The ranks of this tensor-parallel group."""
        return shard_ranks(self.mesh, self.place)

    @property
    def channels(self) -> tuple[tuple[int, int, int], ...]:
        """Every directed pair of ranks that exchanges tensors, once for each of its lanes; equal on all ranks."""
        lines = {pipeline_ranks(self.mesh, self.mesh.place(rank)) for rank in self.mesh.ranks(0)}
        pp = self.mesh.pp
        return tuple(
            sorted(
                (line[src % pp], line[dst % pp], channel_index(src, dst, pp, self.chunks))
                for line in lines
                for src, dst in self.stage_edges
                if src % pp != dst % pp
            )
        )

    @property
    def collective_groups(self) -> tuple[tuple[int, ...], ...]:
        """Rank sets of at least two that sum or broadcast; equal on all ranks.

        They are everybody, the replicas of one part, the shards of one group, and the holders of a tied weight.
        """
        sets = {tuple(range(self.mesh.devices))}
        for place in map(self.mesh.place, range(self.mesh.devices)):
            line = pipeline_ranks(self.mesh, place)
            sets |= {replica_ranks(self.mesh, place), shard_ranks(self.mesh, place)}
            sets |= {tuple(line[position] for position in positions) for positions in self.holders.values()}
        return tuple(sorted(ranks for ranks in sets if len(ranks) > 1))

    def layout(self, name: str) -> Layout:
        """How a weight is stored."""
        return self.storage.get(name, REPLICATED)

    def has_first_copy(self, name: str) -> bool:
        """Whether, within its replica, this rank holds the copy that counts of its part of a weight."""
        split = any(s.axis == TP for s in self.layout(name).splits)
        positions = self.holders.get(name, (self.place.stage,))
        return positions[0] == self.place.stage and (split or self.place.shard == 0)


def pipeline_ranks(mesh: Mesh, place: Place) -> tuple[int, ...]:
    """The ranks at one replica and shard, by position."""
    return tuple(mesh.rank(Place(stage, place.replica, place.shard)) for stage in range(mesh.pp))


def replica_ranks(mesh: Mesh, place: Place) -> tuple[int, ...]:
    """The ranks at one stage and shard, by replica."""
    return tuple(mesh.rank(Place(place.stage, replica, place.shard)) for replica in range(mesh.dp))


def shard_ranks(mesh: Mesh, place: Place) -> tuple[int, ...]:
    """The ranks at one stage and replica, by shard."""
    return tuple(mesh.rank(Place(place.stage, place.replica, shard)) for shard in range(mesh.tp))


def rank_text(mesh: Mesh, rank: int, chunks: int = 1) -> str:
    """``rank 3 (stage 1)``: all its stages, and replica and shard where the mesh has such axes."""
    place = mesh.place(rank)
    stages = " and ".join(map(str, mesh.stages(rank, chunks)))
    words = [f"stage{'s' * (chunks > 1)} {stages}"] if mesh.pp > 1 or mesh.dp == mesh.tp == 1 else []
    words += [f"replica {place.replica}"] if mesh.dp > 1 else []
    words += [f"shard {place.shard}"] if mesh.tp > 1 else []
    return f"rank {rank} ({', '.join(words)})"


@dataclass(frozen=True)
class StepRequest:
    """One call of a step: the model's mode, which schedule, which programs for each microbatch, and this rank's data.

    ``num_updates`` is how many updates there were before it. ``kind`` is the same on all ranks, and in all calls that
    differ in the content of tensors alone; so is ``shapes``, for which targets do not count.
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


@dataclass(frozen=True)
class UpdateResult:
    """What an update of the weights did.

    ``grad_norm`` is the global 2-norm of the gradients before clipping. ``skipped``: float16 gradients overflowed
    (``grad_norm`` is infinite), so that the weights stay as they were and the loss scale is halved.
    """

    grad_norm: float
    skipped: bool = False


@dataclass(frozen=True)
class DeviceStepResult:
    """A training step up to the update, on its rank's device: losses as in `StepNumbers`, the global norm of the
    gradients, kept outputs, and whether the weights have been updated already.
    """

    losses: torch.Tensor
    norm: torch.Tensor
    outputs: list[list[Any]]
    updated: bool = False


@dataclass(frozen=True)
class StepNumbers:
    """What a training step came to.

    ``losses`` are those of all microbatches of all replicas, in the order of the global batch, each as its part of the
    mean; all ranks have them. ``grad_norm`` and ``skipped`` are as in `UpdateResult`; None and False where the weights
    were not to be updated. ``device_seconds`` is the time from the step's first work on this rank's GPU to its last;
    None on CPU.
    """

    losses: list[float]
    grad_norm: float | None = None
    skipped: bool = False
    device_seconds: float | None = None


LazyMetrics = Callable[[], StepNumbers]  # waits until the numbers are there; may be called again


@dataclass(frozen=True)
class RankStepResult:
    """What a training step leaves on a rank.

    Its numbers, which on a GPU are still to be read; and the flattened outputs of this rank's microbatches where it was
    to keep them.
    """

    numbers: StepNumbers | LazyMetrics
    outputs: list[list[Any]]


@dataclass(frozen=True)
class RankStats:
    """What a rank measured: seconds of compute per action of the last step, and the most bytes ever in use.

    ``peak_bytes`` is the process's resident memory on CPU, less libraries and the batch itself, and the allocator's on
    a GPU. ``optimizer_bytes`` is the optimizer's state on this rank. ``started_ns`` is when the first action started,
    on the host's clock (`time.perf_counter_ns`, one for all processes of a host): by it spans of several ranks come
    together. On a GPU it is late by some 10 µs.
    """

    timings: tuple[ActionTiming, ...]
    peak_bytes: int
    optimizer_bytes: int
    started_ns: int = 0
