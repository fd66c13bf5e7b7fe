"""Which sends a rank may wait for, and so free, before each of its actions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopar.schedule import Action, Schedule

FORWARD_WINDOW = 2  # sends under way without backwards: one that is taken while the next is computed


def settled(
    action: Action, rows: Schedule, sources: Collection[int], targets: Collection[int]
) -> list[tuple[int, Action]]:
    """What an action's rank waits for before it: (peer, own earlier action whose tensors the peer has taken by then).

    With backwards: when ``action`` follows an action of a peer, it follows all that the peer ran before, so the peer
    has posted the receives of those. The wait adds no order that the schedule did not have, be it that of hosts or of
    GPU streams; a schedule that can run, which is proved before its launch, still can. What the last actions send is
    waited for at the end of the step.

    Without backwards nothing comes back. The wait is for the sends of two microbatches ago. Every order between
    forwards then goes up in (microbatch, rank): rows and waits to a later microbatch, transfers to a higher rank. So
    there is no circle.

    Args:
        rows: the schedule of all ranks, each phase in the order of microbatches.
        sources: ranks whose action for the same microbatch comes before ``action``.
        targets: ranks to which a forward sends.
    """
    if all(own.kind == "F" for own in rows[action.chunk]):
        early = action.microbatch - FORWARD_WINDOW
        return [(peer, replace(action, microbatch=early)) for peer in targets] if early >= 0 else []
    taken: list[tuple[int, Action]] = []
    for peer in sources:
        row, source = rows[peer], replace(action, chunk=peer)
        start = row.index(replace(source, microbatch=action.microbatch - 1)) if action.microbatch else 0
        passed = row[start : row.index(source)]
        taken += [(peer, replace(theirs, chunk=action.chunk)) for theirs in passed if theirs.kind != action.kind]
    return taken
