"""Dependencies of actions, and an order in which ranks that wait for each other can run their actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autopar.errors import ScheduleError, UsageError
from autopar.schedule.actions import Action, ActionKind, Schedule, format_grid

Node = TypeVar("Node", bound=Hashable)

# By kind of action, the kind that runs before it on the same chunk and microbatch.
AFTER_OWN: Mapping[ActionKind, ActionKind] = {"B": "F", "I": "F", "W": "I"}


@dataclass(frozen=True)
class Links:
    """For each chunk, the chunks whose activations it receives (``sources``) and that receive its own (``targets``)."""

    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(edges: Collection[tuple[int, int]] | None, num_chunks: int) -> Links:
        """The links of (src, dst) pairs; None stands for consecutive chunks.

        Raises:
            UsageError: an edge does not lead from a lower to a higher chunk of the pipeline.
        """
        pairs = sorted(set(chain_edges(num_chunks) if edges is None else edges))
        for src, dst in pairs:
            if not 0 <= src < dst < num_chunks:
                raise UsageError(
                    f"Edge ({src}, {dst}) is impossible in a pipeline of {num_chunks} chunks. "
                    f"Give pairs (src, dst) with 0 <= src < dst < {num_chunks}."
                )
        return Links(
            tuple(tuple(src for src, dst in pairs if dst == chunk) for chunk in range(num_chunks)),
            tuple(tuple(dst for src, dst in pairs if src == chunk) for chunk in range(num_chunks)),
        )

    def before(self, action: Action) -> tuple[Action, ...]:
        """Actions of other chunks whose activation or gradient ``action`` receives."""
        return self._adjacent(action, self.sources, self.targets)

    def after(self, action: Action) -> tuple[Action, ...]:
        """Actions of other chunks that receive the activation or gradient of ``action``."""
        return self._adjacent(action, self.targets, self.sources)

    def _adjacent(
        self, action: Action, forward: Sequence[tuple[int, ...]], backward: Sequence[tuple[int, ...]]
    ) -> tuple[Action, ...]:
        if action.kind == "W":  # exchanges nothing
            return ()
        chunks = (forward if action.kind == "F" else backward)[action.chunk]
        return tuple(Action(action.kind, chunk, action.microbatch) for chunk in chunks)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Actions of any chunk whose results ``action`` reads.

        Of its own chunk, a backward reads its forward, and the gradients of weights those of the inputs.
        """
        earlier = AFTER_OWN.get(action.kind)
        own = () if earlier is None else (Action(earlier, action.chunk, action.microbatch),)
        return own + self.before(action)


def chain_edges(num_chunks: int) -> tuple[tuple[int, int], ...]:
    """The edges between consecutive chunks."""
    return tuple((chunk, chunk + 1) for chunk in range(num_chunks - 1))


@dataclass(frozen=True)
class TopologicalOrder(Generic[Node]):
    """Rows of nodes, run as far as they get.

    Args:
        order: (row, node) in an order that satisfies all dependencies.
        stuck: for each row that does not end, its next node and a dependency that never runs.
    """

    order: tuple[tuple[int, Node], ...]
    stuck: Mapping[int, tuple[Node, Node]]


def topological_order(
    rows: Sequence[Sequence[Node]], needs: Callable[[Node], Iterable[Node]]
) -> TopologicalOrder[Node]:
    """The order in which rows of nodes run when each row is in order and a node waits for all its ``needs``.

    A row that waits is looked at again only when the node it waits for has run, so the time is linear in nodes and
    needs. Which rows get stuck, and where, does not depend on the order in which rows are served.
    """
    position = [0] * len(rows)
    done: set[Node] = set()
    order: list[tuple[int, Node]] = []
    waiting: dict[Node, list[int]] = defaultdict(list)
    stuck: dict[int, tuple[Node, Node]] = {}
    ready = list(reversed(range(len(rows))))
    while ready:
        row = ready.pop()
        stuck.pop(row, None)
        while position[row] < len(rows[row]):
            node = rows[row][position[row]]
            missing = next((need for need in needs(node) if need not in done), None)
            if missing is not None:
                waiting[missing].append(row)
                stuck[row] = (node, missing)
                break
            done.add(node)
            order.append((row, node))
            position[row] += 1
            ready.extend(waiting.pop(node, ()))
    return TopologicalOrder(tuple(order), stuck)


def wait_cycle(stuck: Mapping[int, tuple[Node, Node]], row_of: Callable[[Node], int | None]) -> tuple[int, ...]:
    """Rows that wait for each other in a cycle, or a chain of rows that ends at a node that is in no row."""
    path: list[int] = []
    row: int | None = min(stuck)
    while row is not None and row not in path:
        path.append(row)
        row = row_of(stuck[row][1])
    return tuple(path if row is None else path[path.index(row) :])


def run_order(schedule: Schedule, links: Links) -> tuple[tuple[int, Action], ...]:
    """(rank, action) in an order that satisfies every dependency, when sends do not wait and receives do.

    Raises:
        ScheduleError: the ranks wait for each other, or for an action that no rank has.
    """
    reached = topological_order(schedule, links.needs)
    if not reached.stuck:
        return reached.order
    where = {action: (rank, index) for rank, row in enumerate(schedule) for index, action in enumerate(row)}
    ranks = wait_cycle(reached.stuck, lambda action: where[action][0] if action in where else None)
    words = []
    for rank in ranks:
        action, missing = reached.stuck[rank]
        if missing not in where:
            words.append(f"rank {rank} waits before {action} for {missing}, which no rank runs")
            continue
        other = where[missing][0]
        blocker = reached.stuck[other][0]
        reason = f"is held up on rank {other}" if blocker == missing else f"rank {other} runs only after {blocker}"
        words.append(f"rank {rank} waits before {action} for {missing}, which {reason}")
    raise ScheduleError(
        f"The schedule comes to a halt: {'; '.join(words)}. Move or add the awaited action.\n"
        + format_grid(schedule, [where[reached.stuck[rank][0]] for rank in ranks])
    )
