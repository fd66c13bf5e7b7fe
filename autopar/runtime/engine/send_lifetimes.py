"""Lifetimes of send buffers: which sends a rank may wait for, and so free, before each of its actions."""

from __future__ import annotations

from collections.abc import Callable

from autopar.schedule.actions import Action, Schedule
from autopar.schedule.simulate import simulate

SendKey = tuple[int, Action]  # the receiving chunk, and the action that sends to it
AdjacentActions = Callable[[Action], tuple[Action, ...]]


def send_lifetimes(
    rank: int, schedule: Schedule, producers: AdjacentActions, consumers: AdjacentActions
) -> list[list[SendKey]]:
    """For each action of a rank, the sends to other ranks that have been received by then.

    With backwards: an action that reads from another rank's action follows everything that the other rank ran before
    it, so the other rank has posted the receives of those actions. The wait adds no order to the schedule, neither of
    hosts nor of GPU streams. A schedule that can run, which is proved before its launch, still can. The end of the step
    waits for the sends of the last actions.

    Without backwards, little or nothing comes back. The wait is then for tensors that are received at least one action
    earlier, in a simulation where all actions take equally long and transfers take no time. In that simulation every
    order between actions (rows, transfers, these waits) goes forward in time, so there is no deadlock.

    Args:
        rank: pipeline position.
        producers: actions of other chunks whose tensors an action of this rank reads.
        consumers: actions of other chunks that read the tensors of an action of this rank.
    """
    position = {action: (other, index) for other, row in enumerate(schedule) for index, action in enumerate(row)}
    readers = {action: [a for a in consumers(action) if position[a][0] != rank] for action in schedule[rank]}
    if all(action.kind == "F" for action in schedule[rank]):
        return _forward_lifetimes(schedule[rank], schedule, readers)
    sources: dict[Action, list[Action]] = {}
    for action, actions in readers.items():
        for reader in actions:
            sources.setdefault(reader, []).append(action)
    completed = [0] * len(schedule)  # number of actions of each rank that are known to have run
    waits: list[list[SendKey]] = []
    for action in schedule[rank]:
        waits.append([])
        for other, index in (position[source] for source in producers(action)):
            if other != rank:
                for reader in schedule[other][completed[other] : index]:
                    waits[-1] += [(reader.chunk, source) for source in sources.get(reader, ())]
                completed[other] = max(completed[other], index)
    return waits


def _forward_lifetimes(
    row: tuple[Action, ...], schedule: Schedule, readers: dict[Action, list[Action]]
) -> list[list[SendKey]]:
    """For each action of a row, the sends that are received at least one action earlier, if all take equally long."""
    chunks = 1 + max((action.chunk for other in schedule for action in other), default=0)
    spans = simulate(schedule, [1.0] * chunks, [1.0] * chunks).spans
    start = {span.action: span.start_seconds for span in spans}
    pending: list[tuple[float, SendKey]] = []
    waits: list[list[SendKey]] = []
    for action in row:
        waits.append([key for received, key in pending if received <= start[action] - 1])
        pending = [(received, key) for received, key in pending if received > start[action] - 1]
        pending += [(start[reader], (reader.chunk, action)) for reader in readers[action]]
    return waits
