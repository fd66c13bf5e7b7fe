"""Several models in the processes of a launcher: at the same time, one after the other, closed or dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.forks import run_on_two

MAKE = """
import functools, gc, os, sys, weakref
import torch
import torch.distributed as dist
from torch import nn
import autopar
from support import traces; traces.share()
from support.handmade import plan_by_hand
from autopar.ops.collectives import COMMUNICATORS
from autopar.runtime.comm.process_group import ProcessGroupTransport
from autopar.runtime.launch.model_groups import DROPPED

torch.set_num_threads(1)
gc.disable()  # all ranks have to notice that a model was dropped
rank = int(os.environ["RANK"])
x, y = torch.randn(4, 8), torch.randint(0, 4, (2,))
sgd = functools.partial(torch.optim.SGD, lr=0.1)
plan = plan_by_hand(nn.Linear(8, 4), x, 1, [], dp=2)
options = dict(plan=plan, compile=False, optimizer=sgd, backend="gloo")

def make(**more):
    return autopar.parallelize(nn.Linear(8, 4), 2, x, **(options | more))

def step(pm):
    return pm.train_step(x[:2], y).loss

def typo(parameters):
    raise ValueError("no such optimizer")

def refused(error, **more):
    try:
        make(**more)
        raise SystemExit(f"accepted: {more}")
    except autopar.UsageError as refusal:
        assert error in str(refusal), refusal

def num_groups():
    return len(dist.distributed_c10d._world.pg_map)
"""

SEVERAL = """
refused("no such optimizer", optimizer=typo)
assert not dist.is_initialized() and not COMMUNICATORS

for order in (0, 1), (1, 0):  # the default group is that of both
    models = [make(), make()]
    for closed in order:
        for pm in models:
            step(pm)
            assert pm._ranks.alarm is not None
        models[closed].close()
        models[closed].close()
        if closed == order[0]:
            step(models[order[1]])
            models = [models[order[1]]] * 2
    assert not dist.is_initialized() and not COMMUNICATORS

with make() as pm:  # a failure of a model that was closed does not end the others
    def broken(output, target):
        raise ArithmeticError("no loss today")
    try:
        with make(loss_fn=broken) as other:
            step(other)
    except ArithmeticError:
        pass
    assert pm._ranks.alarm.poll_failure(0.0) is None
    step(pm)
    refused("no such optimizer", optimizer=typo)
    step(pm)
assert not dist.is_initialized() and not COMMUNICATORS

counts = set()
for _ in range(3):  # a sweep without close()
    pm = make()
    step(pm)
    counts.add((num_groups(), len(COMMUNICATORS), len(DROPPED)))
    weight = weakref.ref(next(iter(pm._ranks.rank.trainable.values())))
    del pm
    gc.collect()  # of the graphs of torch.fx
    assert weight() is None
assert len(counts) == 1, counts
make().close()
assert not COMMUNICATORS and not DROPPED and not dist.is_initialized()

pm = make()
dist.destroy_process_group()  # by a user who thinks that it is his
with make() as other:
    pm.close()
    step(other)

dist.init_process_group("gloo")
before = num_groups()
a, b = make(), make()
step(a)
a.close()
step(b)
del b
make().close()
refused("no such optimizer", optimizer=typo)
try:
    ProcessGroupTransport(rank, torch.device("cpu"), (), [(0, 1)], 60.0, "symmetric")
    raise SystemExit("symmetric memory between CPUs was accepted")
except autopar.UsageError:
    pass
assert num_groups() == before and not COMMUNICATORS
dist.destroy_process_group()
print(f"rank {rank} agrees", flush=True)
"""


@pytest.mark.full
def test_models_share_what_the_last_one_destroys(tmp_path: Path) -> None:
    done = run_on_two(tmp_path, MAKE + SEVERAL)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == 2


UNCAUGHT = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as on another node, where the launcher does not know yet
a, b = make(), make()
if rank == 1:
    raise ArithmeticError("no data today")
step(b)
"""


@pytest.mark.full
def test_a_process_that_ends_with_an_exception_is_the_cause_for_all_models(tmp_path: Path) -> None:
    done = run_on_two(tmp_path, MAKE + UNCAUGHT)
    assert done.returncode != 0
    assert "rank 1 ended with ArithmeticError: no data today" in done.stderr, done.stderr[-3000:]
