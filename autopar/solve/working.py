"""What a stage takes beyond what stays and what its microbatches in flight hold: the fullest moment of a backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.ir import BUCKET_BYTES, Holding
from autopar.solve.problem import CutProblem


def working_bytes(problem: CutProblem, members: Sequence[int], weights: Sequence[Holding]) -> int:
    """The most that a backward needs beyond the weights that stand and all that its microbatch saved.

    Its groups run in reverse. While group k runs there are its working set and gradients that no bucket has yet, and
    what the groups behind k saved is gone: max_k (transient_k + gradients_k − Σ_{g > k} saved_g).

    Args:
        members: the stage's groups, ascending.
        weights: those that it holds.
    Error: the working set of a forward's operation is taken to be there when its group's backward runs, which is when
        there is at least as much else.
    """
    cost = problem.cost
    here = set(members)
    freed, come = defaultdict[int, int](int), defaultdict[int, list[Holding]](list)
    for g in members:
        freed[g] = cost.groups[g].saved_bytes
    for saved in cost.saved:
        if own := here.intersection(saved.groups):
            freed[min(own)] += saved.num_bytes
    for weight in weights:
        if weight.gradient_bytes and (own := here.intersection(weight.groups)):
            come[max(own)].append(weight)
    gradients = Arrived(problem.has_buckets, problem.gradients_come)
    most = released = 0
    for g in reversed(members):
        most = max(most, cost.groups[g].transient_bytes + gradients.num_bytes - released)
        for weight in come[g]:
            most = max(most, gradients.add(weight) - released - freed[g])
        released += freed[g]
    # At the end gradients that are summed over shards are packed, while they stay.
    return max(most, gradients.num_bytes + sum(w.packed_bytes for w in weights) - released)


class Arrived:
    """Gradients that a backward has left so far and nobody has taken: those that stay where they come, or those that
    wait for the rest of their bucket (`autopar.runtime.gradients`).

    Error: under ZeRO-1 a bucket of a model with few kinds of blocks may be several times as large as here.
    """

    def __init__(self, has_buckets: bool, stays: bool) -> None:
        self.has_buckets, self.stays = has_buckets, stays
        self.num_bytes = 0
        self.buckets: dict[bool, tuple[int, int]] = {}  # of each kind the one being filled: its size, what came to it

    def add(self, weight: Holding) -> int:
        """A gradient comes; how many bytes there are then, before a full bucket is moved."""
        if self.has_buckets:
            low = weight.copy_bytes > 0
            size, left = self.buckets.get(low, (0, 0))
            if size + weight.gradient_bytes > BUCKET_BYTES:
                self.num_bytes -= left
                size = left = 0
            self.buckets[low] = size + weight.gradient_bytes, left + weight.left_bytes
        self.num_bytes += weight.left_bytes * self.has_buckets + weight.gradient_bytes * self.stays
        return self.num_bytes
