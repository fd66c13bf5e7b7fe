"""The device mesh: sizes of its axes, and each rank's place in it."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, with_config

from autopar.ir.layout import AxisSizes
from autopar.ir.tensor_axes import TensorAxes, axis_sizes, mesh_axes, tensor_axes

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)  # for every type that a plan file holds


@dataclass(frozen=True)
class Place:
    """Coordinates of a rank in the mesh: its stage, its data-parallel replica, its tensor-parallel shard.

    A rank with several chunks of the model has several stages; ``stage`` is the first one, the rank's pipeline
    position.
    """

    stage: int
    replica: int = 0
    shard: int = 0


@with_config(STRICT)
@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh axes: pipeline, tensor and data parallelism.

    Ranks are numbered with the tensor axes innermost, so that their groups lie inside a node, and the pipeline
    outermost. Each replica takes a contiguous part of the batch.

    Args:
        tp: ranks of a tensor-parallel group.
        tp_axes: sizes of the axes of a tensor-parallel group, the outermost first; empty for a single one.
    """

    pp: int
    tp: int = 1
    dp: int = 1
    tp_axes: tuple[int, ...] = ()

    @property
    def tensor_axes(self) -> TensorAxes:
        """The tensor axes, the outermost first; none where tp is 1."""
        return mesh_axes(self.tp_axes or (self.tp,))

    @property
    def axis_sizes(self) -> AxisSizes:
        """Sizes of the tensor axes by name, the outermost first."""
        return axis_sizes(self.tp_axes or (self.tp,))

    @property
    def devices(self) -> int:
        return self.pp * self.tp * self.dp

    def rank(self, place: Place) -> int:
        """The rank at a place."""
        return (place.stage * self.dp + place.replica) * self.tp + place.shard

    def place(self, rank: int) -> Place:
        """The place of a rank."""
        rest, shard = divmod(rank, self.tp)
        stage, replica = divmod(rest, self.dp)
        return Place(stage, replica, shard)

    def ranks(self, position: int) -> tuple[int, ...]:
        """All ranks at one position of the pipeline."""
        width = self.tp * self.dp
        return tuple(range(position * width, (position + 1) * width))

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, the tensor axes one by one; outermost first."""
        return ("pp", "dp", *self.axis_sizes)

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Ranks of a rank's pipeline, replicas or shards: those at its place on the other axes, in the axis's order.

        Args:
            axis: of `axes`, or "tp" for all tensor axes together.
        """
        sizes = {"pp": (self.pp, self.dp * self.tp), "dp": (self.dp, self.tp), "tp": (self.tp, 1)}
        size, stride = (sizes | {own.name: (own.ranks, own.stride) for own in tensor_axes(self.axis_sizes)})[axis]
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + size * stride, stride))

    def __str__(self) -> str:
        tp = f"({' × '.join(map(str, self.tp_axes))})" if self.tp_axes else str(self.tp)
        return f"pp {self.pp} × tp {tp} × dp {self.dp}"
