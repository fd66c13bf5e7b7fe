"""Every conversion of a tensor on two and four real ranks, forward and backward, against the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product

import pytest
import torch
from support.ranks import axis_key, index, main, run_on_ranks, summed, tensor_axis

from autopar.ir.layout import REPLICATED, Layout, broadcast_layout, partial_layout, split_layout
from autopar.ops.registry import operator
from autopar.runtime.comm.axis_communicators import GroupCommunicator
from autopar.sharding.reshard import reshard_steps
from autopar.sharding.tensors import local_part

SHAPE = (8, 24, 4)
LAYOUTS = {
    "R": REPLICATED, "B": broadcast_layout(), "P": partial_layout(),
    "S0": split_layout(0), "S1": split_layout(1), "S1x3": split_layout(1, 3), "S0x2": split_layout(0, 2),
}  # fmt: skip
PAIRS = list(product(LAYOUTS, repeat=2))


# Operators with their arguments, and what they send forward | backward.
STEPS = """\
R → R: nothing
R → S0: shard(0, 1, 4, tp, False) – | all-gather
R → S1x3: shard(1, 3, 4, tp, False) – | all-gather
R → P: first_rank(tp,) – | –
R → B: sum_gradient(tp,) – | all-reduce
S0 → R: all_gather(0, 1, 4, tp, False) all-gather | –
S0 → S0: nothing
S0 → S1x3: all_to_all(0, 1, 1, 3, 4, tp) all-to-all | all-to-all
S0 → P: all_gather(0, 1, 4, tp, False) all-gather | –, first_rank(tp,) – | –
S0 → B: all_gather(0, 1, 4, tp, True) all-gather | reduce-scatter
S1x3 → R: all_gather(1, 3, 4, tp, False) all-gather | –
S1x3 → S0: all_to_all(1, 3, 0, 1, 4, tp) all-to-all | all-to-all
S1x3 → S1x3: nothing
S1x3 → P: all_gather(1, 3, 4, tp, False) all-gather | –, first_rank(tp,) – | –
S1x3 → B: all_gather(1, 3, 4, tp, True) all-gather | reduce-scatter
P → R: all_reduce(tp,) all-reduce | –
P → S0: reduce_scatter(0, 1, 4, tp) reduce-scatter | all-gather
P → S1x3: reduce_scatter(1, 3, 4, tp) reduce-scatter | all-gather
P → P: nothing
P → B: all_reduce(tp,) all-reduce | –, sum_gradient(tp,) – | all-reduce
B → R: share_gradient(4,) – | –
B → S0: shard(0, 1, 4, tp, True) – | –
B → S1x3: shard(1, 3, 4, tp, True) – | –
B → P: share_gradient(4,) – | –, first_rank(tp,) – | –
B → B: nothing"""


def laid_out(whole: torch.Tensor, layout: Layout, axis: GroupCommunicator) -> torch.Tensor:
    """This rank's part, copy or summand of a whole tensor."""
    if layout.partial:
        summands = [torch.randn_like(whole) for _ in range(axis.ranks - 1)]
        return [*summands, whole - sum(summands)][axis.rank].clone()
    return local_part(whole, layout, {"tp": axis.ranks}, index(axis)).clone()


def assert_is(local: torch.Tensor, whole: torch.Tensor, layout: Layout, axis: GroupCommunicator) -> None:
    """Check that all ranks' local tensors together are the whole one."""
    local = summed(local, axis) if layout.partial else local
    expected = laid_out(whole, Layout(layout.splits), axis)
    assert local.is_contiguous() and torch.allclose(local, expected, rtol=0, atol=1e-12), f"{local} is not {expected}"


def gradient_layout(layout: Layout) -> Layout:
    """How the gradients of a tensor lie: whole on every summand, summands where it is partial in its gradient."""
    return Layout(layout.splits, layout.partial_gradient)


def converts(made: Layout, read: Layout, tp: int) -> None:
    """Convert and differentiate; all tensors random, and the same on all ranks before they are laid out."""
    whole, gradient = torch.randn(SHAPE, dtype=torch.float64), torch.randn(SHAPE, dtype=torch.float64)
    axis = tensor_axis(tp)
    x = laid_out(whole, made, axis).requires_grad_()
    y = x
    for step in reshard_steps(made, read, "tp", tp):
        args = tuple(axis_key(tp) if argument == "tp" else argument for argument in step.args)
        y = operator(f"autopar.{step.name}.default")(y, *args)
    assert_is(y, whole, read, axis)
    y.backward(laid_out(gradient, gradient_layout(read), axis))
    assert x.grad is not None
    assert_is(x.grad, gradient, gradient_layout(made), axis)


CASES = {
    f"{made} → {read} on {tp}": partial(converts, LAYOUTS[made], LAYOUTS[read], tp)
    for tp in (2, 4)
    for made, read in PAIRS
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return run_on_ranks(__file__, tmp_path_factory.mktemp("convert"))


@pytest.mark.parametrize("case", CASES)
def test_a_conversion_equals_the_whole_tensor(found: Mapping[str, str], case: str) -> None:
    assert found[case] == ""


def test_steps_and_what_they_send() -> None:
    rows = []
    for made, read in product(("R", "S0", "S1x3", "P", "B"), repeat=2):
        found = reshard_steps(LAYOUTS[made], LAYOUTS[read], "tp", 4)
        texts = [f"{s.name}{s.args} {s.forward or '–'} | {s.backward or '–'}" for s in found]
        rows.append(f"{made} → {read}: {', '.join(texts) or 'nothing'}".replace("'", ""))
    assert "\n".join(rows) == STEPS


if __name__ == "__main__":
    main(CASES)
