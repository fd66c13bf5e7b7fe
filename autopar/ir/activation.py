"""Groups that keep an activation from forward to backward, under any recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NO_SEGMENT = -1  # of operations that always run once


@dataclass(frozen=True, order=True)
class Keeper:
    """A group that keeps a tensor for its backward, and the segment of the operation for which it does."""

    group: int
    segment: int


@dataclass(frozen=True)
class Activation:
    """Groups that keep a tensor from forward to backward.

    Args:
        saved_by: keepers while their segment does not recompute.
        entered_by: keeper if its segment recomputes: the first operation that reads the tensor outside the segment
            that makes it.
    """

    saved_by: tuple[Keeper, ...]
    entered_by: Keeper | None = None

    def groups(self, bounds: Sequence[int]) -> tuple[int, ...]:
        """Groups that keep the tensor where segments below the bound of each group recompute."""
        found = {k.group for k in self.saved_by if not 0 <= k.segment < bounds[k.group]}
        entered = self.entered_by
        if entered is not None and entered.segment < bounds[entered.group]:
            found.add(entered.group)
        return tuple(sorted(found))

    def since(self, group: int) -> Activation:
        """The keepers from a group on."""
        entered = self.entered_by
        return Activation(
            tuple(k for k in self.saved_by if k.group >= group),
            entered if entered is not None and entered.group >= group else None,
        )
