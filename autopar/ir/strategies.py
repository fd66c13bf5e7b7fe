"""How a model can be sharded: the choices of every group and what each costs. The input of the sharding solver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.layout import Layout


@dataclass(frozen=True)
class Choice:
    """One way to run a group on the ranks of a tensor-parallel axis.

    Times are per microbatch on each rank, collectives inside the group included; ``step_seconds`` is spent once a step
    (summing the gradients of weights that are replicated and read on split data). ``weight_bytes`` holds value,
    gradient and optimizer state of a rank's part.

    Args:
        labels: the strategy of every operation of the group that is not replicated, by name.
        takes: the layout in which it reads each of ``ChoiceGroup.reads``.
        gives: the layout of each of ``ChoiceGroup.makes``; never partial.
        stores: the layout of each of ``ChoiceGroup.weights``.
    """

    name: str
    labels: tuple[tuple[str, str], ...]
    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    saved_bytes: int
    weight_bytes: int
    takes: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    stores: tuple[Layout, ...]

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class ChoiceGroup:
    """A group and its choices; the first one replicates everything. Groups of one ``kind`` share their choice.

    ``reads`` are values that other groups make, ``makes`` values that other groups read.
    """

    name: str
    kind: int
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    weights: tuple[str, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Conversion:
    """What it costs to bring a tensor from the layout in which it is made into one in which it is read, per microbatch.

    ``saved_bytes`` of the copy that is made are kept for the backward besides the tensor itself; conversions inside a
    group have theirs in the group's.
    """

    forward_seconds: float
    backward_seconds: float
    saved_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class ChoiceGraph:
    """All groups in the order of a `CostGraph`, the last one being the loss, which reads everything replicated.

    A tensor is converted once for all groups of a stage that read it in one layout, on their stage. ``conversions``
    holds every (value, made, read) that can occur with two different layouts. Groups that read one weight must agree
    on its layout.
    """

    groups: tuple[ChoiceGroup, ...]
    value_bytes: Mapping[str, int]
    conversions: Mapping[tuple[str, Layout, Layout], Conversion] = field(repr=False)

    def __post_init__(self) -> None:
        made: set[str] = set()
        for group in self.groups:
            assert group.choices and all(value in made for value in group.reads), f"{group.name} reads too early"
            made.update(group.makes)
            for choice in group.choices:
                assert len(choice.takes) == len(group.reads) and len(choice.gives) == len(group.makes)
                assert len(choice.stores) == len(group.weights)
