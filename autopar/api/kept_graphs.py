"""Graphs that forwards have left on the ranks for a later backward (`autopar.api.autograd`).

A graph is the activations of a batch, under a number. As in torch, it ends with its backward, with its outputs, or once
the weights have changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import UsageError

USED = (
    "The backward of these outputs has run already, and its activations are freed. Add the losses and call backward "
    "once; retain_graph=True has no effect here."
)
CHANGED = (
    "The weights have changed since the forward that computed these outputs, so its backward would mix two models. "
    "Call backward before the update, or run the forward again."
)
MAX_AGREED = 62  # graphs whose ends ranks of a launcher agree on: bits of one int64, without its sign


@dataclass(eq=False)
class KeptGraph:
    """Graph that a forward has left on the ranks.

    Args:
        tracked: whether each of the model's flattened outputs depends on a weight that is trained.
        ended: why the graph is gone, or empty.
    """

    number: int
    tracked: tuple[bool, ...] = ()
    ended: str = ""

    def check_open(self) -> None:
        """Raise a UsageError if the graph is gone."""
        if self.ended:
            raise UsageError(self.ended)


class KeptGraphs:
    """Graphs of one model that wait for their backwards, by number.

    Ranks bind a schedule to each number, so all ranks of a launcher use the same ones: a number is free again after its
    backward, after an update, or once its outputs are gone on all ranks.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, weakref.ref[KeptGraph]] = {}

    def open(self, tracked: Sequence[bool]) -> KeptGraph:
        """A graph with the first free number."""
        number = next(n for n in range(len(self.by_number) + 1) if n not in self.by_number)
        graph = KeptGraph(number, tuple(tracked))
        self.by_number[graph.number] = weakref.ref(graph)
        return graph

    def close(self, graph: KeptGraph) -> None:
        """End a graph whose backward begins."""
        graph.ended = USED
        del self.by_number[graph.number]

    def unreachable(self) -> int:
        """Numbers of graphs whose outputs are gone, as bits."""
        return sum(1 << n for n, graph in self.by_number.items() if graph() is None and n < MAX_AGREED)

    def forget(self, bits: int) -> tuple[int, ...]:
        """Forget the graphs whose numbers are given as bits; returns these numbers."""
        numbers = tuple(n for n in self.by_number if n < MAX_AGREED and bits >> n & 1)
        for number in numbers:
            del self.by_number[number]
        return numbers

    def end_all(self) -> tuple[int, ...]:
        """End all graphs because the weights change; returns their numbers."""
        numbers = tuple(self.by_number)
        for reference in self.by_number.values():
            if (graph := reference()) is not None:
                graph.ended = CHANGED
        self.by_number.clear()
        return numbers
