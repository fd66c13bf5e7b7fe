"""Working set of a stage: its peak beyond resident tensors and the microbatches in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.cost_graph import BUCKET_BYTES, ResidentTensor
from autopar.solve.cuts.problem import CutProblem


def working_bytes(problem: CutProblem, members: Sequence[int], weights: Sequence[ResidentTensor]) -> int:
    """Most bytes that a backward needs beyond allocated weights and the activations saved by its microbatch.

    Groups run in reverse. While group k runs, its working set and the pending gradients are allocated, and the
    activations of the groups after k are freed: max_k (transient_k + gradients_k − Σ_{g > k} saved_g), and at least
    every workspace_k.

    Args:
        members: the stage's groups, ascending.
        weights: resident tensors of the stage.
    Error: the working set of a forward's operation counts at its group's backward, when at least as much else is
        allocated.
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
    # At the end, gradients that are summed over shards are flattened into a copy.
    packed = gradients.num_bytes * (not problem.has_buckets) + sum(w.flattened_grad_bytes for w in weights)
    return max(most, gradients.rest() - released, packed - released)


class PendingGrads:
    """Gradients that a backward has produced and no main gradient has absorbed.

    Without buckets they stay where autograd leaves them. With buckets they wait until their bucket is full
    (`autopar.runtime.params.grad_buffer`); low-precision ones are widened before they are added.

    Error: under ZeRO a bucket of a model with few kinds of blocks may be several times as large as here. GPUs widen
        small gradients only.
    """

    def __init__(self, problem: CutProblem) -> None:
        self.has_buckets, self.stays = problem.has_buckets, problem.gradients_come
        self.adds = problem.microbatches > 1
        self.num_bytes = 0
        self.buckets: dict[bool, Bucket] = {}  # of each kind the one being filled

    def add(self, weight: ResidentTensor) -> int:
        """Add a gradient; most bytes that are pending until the next one."""
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
        """Bytes while the last buckets are flushed, after the backward."""
        return self.num_bytes + max((bucket.wide_bytes for bucket in self.buckets.values()), default=0)


@dataclass(frozen=True)
class Bucket:
    """Bucket being filled: its bytes so far, those of the pending wgrads, and those of their widened copies."""

    num_bytes: int = 0
    wgrad_bytes: int = 0
    wide_bytes: int = 0
