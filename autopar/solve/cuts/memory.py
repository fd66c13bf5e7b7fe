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
    order = [*reversed(members)]
    pending = pending_gradients(problem, [come[g] for g in order])
    most, released = max((cost.groups[g].workspace_bytes for g in members), default=0), 0
    for g, before, arrived in zip(order, pending.before, pending.arrived, strict=True):
        most = max(most, cost.groups[g].transient_bytes + before - released)
        released += freed[g]
        most = max(most, arrived - released)
    # At the end, gradients that are summed over shards are flattened into a copy.
    left = pending.after[-1] if order else 0
    packed = left * (not problem.has_buckets) + sum(w.flattened_grad_bytes for w in weights)
    return max(most, left - released, packed - released)


@dataclass(frozen=True)
class PendingGradients:
    """Bytes of gradients that a backward has produced and no main gradient has absorbed, for each of its groups.

    Args:
        before: while the group runs. arrived: the most while its weights' gradients arrive, 0 without any. after: if
            the backward ends with the group and the last buckets are flushed.
    """

    before: Sequence[int]
    arrived: Sequence[int]
    after: Sequence[int]


def pending_gradients(problem: CutProblem, arriving: Sequence[Sequence[ResidentTensor]]) -> PendingGradients:
    """Pending gradients of a backward.

    Without buckets they stay where autograd leaves them. With buckets they wait until their bucket is full
    (`autopar.runtime.params.grad_buffer`); low-precision ones are widened before they are added.

    Args:
        arriving: for each group in the order of the backward, the weights whose gradients it completes.
    Error: under ZeRO a bucket of a model with few kinds of blocks may be several times as large as here. GPUs widen
        small gradients only.
    """
    has_buckets, stays, adds = problem.has_buckets, problem.gradients_come, problem.microbatches > 1
    total, kinds = 0, {}  # of each kind, the bucket being filled: its bytes, pending wgrads, their widened copies
    before, arrived, after = [], [], []
    for weights in arriving:
        before.append(total)
        most = 0
        for weight in weights:
            if not has_buckets:
                total += weight.gradient_bytes * stays
                most = max(most, total)
                continue
            low, gradient, wgrad = weight.copy_bytes > 0, weight.gradient_bytes, weight.wgrad_bytes
            filled, waiting, wide = kinds.get(low, (0, 0, 0))
            if filled + gradient > BUCKET_BYTES:
                most = max(most, total + wide)
                total -= waiting
                filled = waiting = wide = 0
            total += wgrad
            most = max(most, total)
            kinds[low] = filled + gradient, waiting + wgrad, wide + (gradient if low and adds and wgrad else 0)
        arrived.append(most)
        after.append(total + max((wide for _, _, wide in kinds.values()), default=0))
    return PendingGradients(before, arrived, after)
