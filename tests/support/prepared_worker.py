"""Script for two ranks of torchrun: a prepared loop has the numbers of one device on the whole batch."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import UsageError
from support import effort, traces
from support.models import tiny_vit
from support.prepared_loops import assert_same, assert_same_state, batches, grouped_sgd, on_ranks, run

MESHES: list[dict[str, Any]] = [{"dp": 2, "zero": 1}]
MESHES += [{"pp": 2, "microbatches": 2}, {"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}] if effort.full() else []


def check_loop(mesh: dict[str, Any]) -> None:
    """Compare a loop in which each process feeds its part, as under DistributedDataParallel."""
    model, data = tiny_vit(depth=2), batches(4)
    alone = copy.deepcopy(model)
    optimizer = grouped_sgd(alone)
    expected = run(alone, optimizer, data)
    module, prepared = on_ranks(model, grouped_sgd, 2, batch_size=8, **mesh)
    pm, samples = module.pm, 8 // module.pm.data_size
    shown = run(module, prepared, data, slice(pm.data_rank * samples, (pm.data_rank + 1) * samples))
    losses = [total / pm.data_size for total in pm.data_sum(shown.losses)]
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected.losses), atol=1e-5)
    assert torch.allclose(torch.tensor(shown.norms), torch.tensor(expected.norms), rtol=1e-4)
    assert_same(shown.gradients, expected.gradients)
    assert_same(module.state_dict(), dict(alone.state_dict()))
    assert_same_state(prepared.state_dict(), optimizer.state_dict())
    pm.close()


def check_mistakes(rank: int) -> None:
    """Ranks of a pipeline with different samples, and backwards in different orders, are errors on both."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.ones(6, 4), torch.arange(6) % 3
    module, _ = on_ranks(model, grouped_sgd, 2, example_inputs=x, pp=2)
    try:
        module(x + rank)
        raise AssertionError("different samples")
    except UsageError as error:
        assert "Ranks 0 and 1 were given different inputs" in str(error), error
    losses = [F.cross_entropy(module(x), y), F.cross_entropy(module(2 * x), y)]
    for loss in losses[:: -1 if rank else 1]:
        loss.backward()
    try:
        module.pm.gradients()
        raise AssertionError("different orders")
    except UsageError as error:
        assert "make different calls: backward(0) and then backward(1)" in str(error), error
    module.pm.close()


if __name__ == "__main__":
    traces.share()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for mesh in MESHES:
        check_loop(mesh)
        print(f"{mesh} agrees", flush=True)
    check_mistakes(int(os.environ["RANK"]))
