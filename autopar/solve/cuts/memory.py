"""What a stage takes beyond what stays and what its microbatches in flight hold: the fullest moment of a backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.cost_graph import BUCKET_BYTES, ResidentTensor
from autopar.solve.cuts.problem import CutProblem


def working_bytes(problem: CutProblem, members: Sequence[int], weights: Sequence[ResidentTensor]) -> int:
    """The most that a backward needs beyond the weights that stand and all that its microbatch saved.

    Its groups run in reverse. While group k runs there are its working set and gradients that no bucket has yet, and
    what the groups behind k saved is gone: max_k (transient_k + gradients_k − Σ_{g > k} saved_g), and no less than any
    workspace_k.

    Args:
        members: the stage's groups, ascending.
        weights: those that it holds.
    Error: the working set of a forward's operation is taken to be there when its group's backward runs, which is when
        there is at least as much else.
    """
    cost = problem.cost
    here = set(members)
    freed, come = defaultdict[int, int](int), defaultdict[int, list[ResidentTensor]](list)
    for g in members:
        freed[g] = cost.groups[g].saved_bytes
    for saved in cost.saved:
        if own := here.intersection(saved.groups):
            freed[min(own)] += saved.num_bytes
    for weight in weights:
        if weight.gradient_bytes and (own := here.intersection(weight.groups)):
            come[max(own)].append(weight)
    gradients = PendingGrads(problem)
    most, released = max((cost.groups[g].workspace_bytes for g in members), default=0), 0
    for g in reversed(members):
        most = max(most, cost.groups[g].transient_bytes + gradients.num_bytes - released)
        for weight in come[g]:
            most = max(most, gradients.add(weight) - released - freed[g])
        released += freed[g]
    # At the end gradients that are summed over shards are packed, while they stay.
    packed = gradients.num_bytes * (not problem.has_buckets) + sum(w.flattened_grad_bytes for w in weights)
    return max(most, gradients.rest() - released, packed - released)


class PendingGrads:
    """Gradients that a backward has left so far and nobody has taken: those that stay where they come, or those that
    wait for the rest of their bucket (`autopar.runtime.params.grad_buffer`). Low-precision ones are widened to be added
    to sums that are there.

    Error: under ZeRO-1 a bucket of a model with few kinds of blocks may be several times as large as here. GPUs widen
        only small ones.
    """

    def __init__(self, problem: CutProblem) -> None:
        self.has_buckets, self.stays = problem.has_buckets, problem.gradients_come
        self.adds = problem.microbatches > 1
        self.num_bytes = 0
        self.buckets: dict[bool, Bucket] = {}  # of each kind the one being filled

    def add(self, weight: ResidentTensor) -> int:
        """A gradient comes; how many bytes there are at most until the next one."""
        if not self.has_buckets:
            self.num_bytes += weight.gradient_bytes * self.stays
            return self.num_bytes
        low, most = weight.copy_bytes > 0, 0
        bucket = self.buckets.get(low, Bucket())
        if bucket.num_bytes + weight.gradient_bytes > BUCKET_BYTES:
            most = self.num_bytes + bucket.wide_bytes
            self.num_bytes -= bucket.wgrad_bytes
            bucket = Bucket()
        self.num_bytes += weight.wgrad_bytes
        wide = weight.gradient_bytes if low and self.adds and weight.wgrad_bytes else 0
        self.buckets[low] = Bucket(
            bucket.num_bytes + weight.gradient_bytes, bucket.wgrad_bytes + weight.wgrad_bytes, bucket.wide_bytes + wide
        )
        return max(most, self.num_bytes)

    def rest(self) -> int:
        """The backward is over: how many bytes there are while the last buckets are moved."""
        return self.num_bytes + max((bucket.wide_bytes for bucket in self.buckets.values()), default=0)


@dataclass(frozen=True)
class Bucket:
    """A bucket that gradients come to: its size so far, what they take where they came, and widened."""

    num_bytes: int = 0
    wgrad_bytes: int = 0
    wide_bytes: int = 0
