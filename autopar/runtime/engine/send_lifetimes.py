"""Which sends a rank may wait for, and so free, before each of its actions."""

from __future__ import annotations

from collections.abc import Callable

from autopar.schedule.actions import Action, Schedule
from autopar.schedule.simulate import simulate

SendKey = tuple[int, Action]  # a chunk, and the action of another one whose tensors it takes
AdjacentActions = Callable[[Action], tuple[Action, ...]]


def send_lifetimes(
    rank: int, schedule: Schedule, producers: AdjacentActions, consumers: AdjacentActions
) -> list[list[SendKey]]:
    """What a rank waits for before each of its actions: sends to other ranks that have been taken by then.

    With backwards: when an action follows one of another rank, it follows all that this rank ran before, so that rank
    has posted the receives of those. The wait adds no order that the schedule did not have, be it that of hosts or of
    GPU streams; a schedule that can run, which is proved before its launch, still can. What the last actions send is
    waited for at the end of the step.

    Without backwards nothing comes back, or late. The wait is for what is taken at least one action earlier where all
    actions take equally long and transfers no time: there each order between actions (rows, transfers, these waits)
    goes up in time. So there is no circle.

    Args:
        before: the actions of other chunks whose tensors an action of this rank takes.
        after: those that take the tensors of an action of this rank.
    """
    position = {action: (other, index) for other, row in enumerate(schedule) for index, action in enumerate(row)}
    takers = {own: [a for a in consumers(own) if position[a][0] != rank] for own in schedule[rank]}
    if all(own.kind == "F" for own in schedule[rank]):
        return _forward_lifetimes(schedule[rank], schedule, takers)
    sources: dict[Action, list[Action]] = {}
    for action, actions in takers.items():
        for taker in actions:
            sources.setdefault(taker, []).append(action)
    completed = [0] * len(schedule)  # of each rank's row, how many actions this rank knows to have run
    waits: list[list[SendKey]] = []
    for action in schedule[rank]:
        waits.append([])
        for other, index in (position[source] for source in producers(action)):
            if other != rank:
                for taker in schedule[other][completed[other] : index]:
                    waits[-1] += [(taker.chunk, source) for source in sources.get(taker, ())]
                completed[other] = max(completed[other], index)
    return waits


def _forward_lifetimes(
    row: tuple[Action, ...], schedule: Schedule, takers: dict[Action, list[Action]]
) -> list[list[SendKey]]:
    """For each action of a row, what was taken at least one action before it, where all take equally long."""
    chunks = 1 + max((action.chunk for other in schedule for action in other), default=0)
    spans = simulate(schedule, [1.0] * chunks, [1.0] * chunks).spans
    start = {span.action: span.start_seconds for span in spans}
    under_way: list[tuple[float, SendKey]] = []
    waits: list[list[SendKey]] = []
    for own in row:
        waits.append([message for taken, message in under_way if taken <= start[own] - 1])
        under_way = [(taken, message) for taken, message in under_way if taken > start[own] - 1]
        under_way += [(start[taker], (taker.chunk, own)) for taker in takers[own]]
    return waits
