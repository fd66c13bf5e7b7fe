"""Models under torchrun: every rank is a device and sees the numbers of one device, whatever modes torch is in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.caller_modes import MODES, PLACES, SETTINGS, assert_equal, results
from support.forks import run_on_two, run_ranks

SCRIPT = """
import os, sys
import psutil
import torch, torch.distributed as dist
from torch import nn
from support import traces; traces.share()
from support.effort import full
from support.handmade import plan_by_hand
from support.reference import Reference, assert_all_close, assert_close
from support.models import Tied
import autopar

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
own_group = sys.argv[1] == "own"
if own_group:
    dist.init_process_group("gloo")
torch.manual_seed(0)
truth = Tied()
x, y = torch.randint(0, 32, (7, 5)), torch.randint(0, 32, (7,))
model = Tied()
if rank == 0:
    model.load_state_dict(truth.state_dict())  # the other rank starts from other weights: rank 0's count
adamw = lambda p: torch.optim.AdamW(p, lr=1e-2)
plan = plan_by_hand(truth, x, 4, ["layers.1.1.linear"])

try:
    autopar.parallelize(model, 3, x, plan=plan)
    raise SystemExit("devices=3 was accepted")
except autopar.UsageError as error:
    assert "devices=3, but torchrun started 2 processes. Pass devices=2 or --nproc-per-node 3." in str(error), error

reference = Reference(truth, make_optimizer=adamw)
for round in range(2 if own_group or full() else 1):  # a second model in the same processes
    with autopar.parallelize(model, 2, x, optimizer=adamw, plan=plan) as pm:
        if round == 1:
            pm.load_state_dict(reference.model.state_dict())
            reference = Reference(reference.model, make_optimizer=adamw)
        for _ in range(2):
            loss = reference.forward_backward(x, y, 4)
            result = pm.forward_backward(x, y, return_outputs=True)
            assert abs(result.loss - loss) < 1e-5, (result.loss, loss)
            assert_close(result.outputs, reference.forward(x, 4)[0], "outputs of a step")
            assert_all_close(pm.gradients(), reference.gradients(), "gradient")
            reference.step()
            pm.optimizer_step()
        assert_all_close(pm.state_dict(), dict(reference.model.state_dict()), "state")
        pm.eval()
        reference.model.eval()
        assert_close(pm(x), reference.forward(x, 4)[0], "output")
        reference.model.train()
        assert pm.stats().keys() == {0, 1}
        tensor, process = torch.ones(2**26), psutil.Process()
        full = process.memory_info().rss
        del tensor
        assert full - process.memory_info().rss > 2**27, "the process's allocator does not give memory back"
    assert dist.is_initialized() == own_group
    try:
        pm(x)
        raise SystemExit("a closed model answered")
    except autopar.UsageError:
        pass

def loss_fn(output, target):
    raise ArithmeticError("no loss today")

if own_group:
    dist.destroy_process_group()
if sys.argv[1] == "fail":
    autopar.parallelize(model, 2, x, loss_fn=loss_fn, plan=plan).forward_backward(x, y)
print(f"rank {rank} agrees", flush=True)
"""


def torchrun(folder: Path, mode: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "script.py",
        mode,
    ]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def assert_both_ranks_agree(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    # The launcher may put one rank's text between another's and its line end.
    assert sorted(re.findall(r"rank \d agrees", done.stdout)) == ["rank 0 agrees", "rank 1 agrees"]


def test_every_rank_has_the_numbers_of_one_device(tmp_path: Path) -> None:
    assert_both_ranks_agree(run_on_two(tmp_path, SCRIPT, "own"))


def test_autopar_makes_and_ends_its_own_group_and_an_exception_ends_the_run(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "fail")
    assert done.returncode != 0 and "agrees" not in done.stdout
    assert "ArithmeticError: no loss today" in done.stderr, done.stderr[-3000:]
    assert "autopar: rank 1 (stage 1), in action 1F0" in done.stderr


REPLICAS = """
import os, sys
import torch
from support import traces; traces.share()
from support.handmade import plan_by_hand
from support.reference import Reference, assert_all_close, assert_close
from support.models import Tied
import autopar

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = Tied()
x, y = torch.randint(0, 32, (10, 5)), torch.randint(0, 32, (10,))
adamw = lambda p: torch.optim.AdamW(p, lr=1e-2)
reference = Reference(model, make_optimizer=adamw)
plan = plan_by_hand(model, x, 2, [], dp=2, zero=1)
with autopar.parallelize(model, 2, x, optimizer=adamw, plan=plan) as pm:
    assert (pm.data_rank, pm.data_size) == (rank, 2)
    own = slice(5 * rank, 5 * rank + 5)
    for _ in range(2):
        loss = reference.forward_backward(x, y, 2, 2)
        result = pm.forward_backward(x[own], y[own], return_outputs=True)
        assert abs(result.loss - loss) < 1e-5, (result.loss, loss)
        assert_close(result.outputs, reference.forward(x, 2, 2)[0][own], "outputs of a step")
        assert_all_close(pm.gradients(), reference.gradients(), "gradient")
        reference.step()
        pm.optimizer_step()
    try:
        pm.train_step(x[: 4 + rank], y[: 4 + rank])
        raise SystemExit("unequal parts were accepted")
    except autopar.UsageError as error:
        assert "different sizes: 4 on data rank 0, 5 on data rank 1. Each call takes an equal part" in str(error), error
    mine, target, train = x[own], y[own], pm.train_step
    for call, rank0, rank1 in (  # each rank goes on after an error
        (lambda: train(mine, target[: 5 - rank]), "Rank 1 refused its part of train_step", "A target has shape"),
        (lambda: train(mine.float() if rank else mine, target), "nothing has changed on any rank: Input", "Input"),
        (lambda: pm(mine if rank else mine[None]), "Input", "Rank 0 refused its part of forward in train mode"),
        (lambda: train(mine, target, share=0.5 - rank), "Rank 1 refused", "share=-0.5 must be"),
        (lambda: train(mine, target, share=0.5 + rank / 2), *["different calls: train_step in train mode, sh"] * 2),
        (lambda: train(mine, target, rank == 1), *["with outputs on rank 1. Nothing has changed"] * 2),
        (lambda: pm(mine) if rank else train(mine, target), *["forward in train mode on rank 1"] * 2),
        (lambda: train(mine, target.to("meta") if rank else target), "Rank 1 was given", "Rank 1 was given"),
    ):
        try:
            call()
            raise SystemExit(f"accepted what should have been refused: {rank0}")
        except autopar.UsageError as error:
            assert (rank1 if rank else rank0) in str(error), error
    loss = reference.forward_backward(x[:6], y[:6], 2, 2)
    reference.step()
    assert abs(pm.train_step(x[3 * rank : 3 * rank + 3], y[3 * rank : 3 * rank + 3]).loss - loss) < 1e-5
    assert_all_close(pm.state_dict(), dict(reference.model.state_dict()), "state")
    other = {name: tensor.double() + 1 for name, tensor in model.state_dict().items()}
    pm.load_state_dict(other if rank else model.state_dict())  # rank 0's counts
    both = pm._ranks.gathered({name: tensor.detach() for name, tensor in pm._ranks.rank.stored.items()})
    assert {name for replica in both for name in replica} == {n for n, _ in model.named_parameters()}
    for replica in both:
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in replica.items())
    for refused in ({}, None, other | {"layers.1.1.bias": 0.0}):
        try:
            pm.load_state_dict(refused if rank else other)
            raise SystemExit(f"accepted: {refused}")
        except autopar.UsageError as error:
            whose = "Rank 1 refused its state dict, so nothing has changed on any rank: "
            assert str(error).startswith(whose) == (rank == 0) and "state dict" in str(error).removeprefix(whose), error
    assert_all_close(pm.state_dict(), dict(model.state_dict()), "state")
    assert_close(pm.eval()(x[own]), model.eval()(x).detach()[own], "output")
print(f"rank {rank} agrees", flush=True)
"""


def test_each_replica_is_given_its_own_part(tmp_path: Path) -> None:
    assert_both_ranks_agree(run_on_two(tmp_path, REPLICAS))


GROUPS = """
import functools, os
import torch
import torch.nn.functional as F
from support import traces; traces.share()
from support.handmade import plan_by_hand
from support.models import tiny_vit
from support.reference import Reference, assert_all_close, assert_close, replica_part
import autopar

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model, x, y = tiny_vit(3), torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
adamw = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
reference = Reference(model, F.cross_entropy, adamw)
plan = plan_by_hand(model, x, 2, [], dp=4, zero=3, dp_shard=2)

def agree():
    assert_all_close(pm.state_dict(), dict(reference.model.state_dict()), "state")

with autopar.parallelize(model, 4, x, plan=plan, loss_fn=F.cross_entropy, optimizer=adamw) as pm:
    assert (pm.data_rank, pm.data_size) == (rank, 4)
    held = pm._ranks.gathered(sum(p.numel() for p in pm._ranks.rank.sharded.pieces.values()))
    numel = sum(p.numel() for p in model.parameters())
    assert held[0] + held[1] == held[2] + held[3] == numel and max(held) < 0.6 * numel, held
    own, target = replica_part(x, pm), replica_part(y, pm)
    for _ in range(2):
        loss = reference.forward_backward(x, y, 2, 4)
        assert abs(pm.forward_backward(own, target).loss - loss) < 1e-5
        assert_all_close(pm.gradients(), reference.gradients(), "gradient")
        loss = reference.forward_backward(x, y, 2, 4)  # gradients accumulate
        norm = torch.nn.utils.get_total_norm(reference.gradients().values()).item()
        reference.step()
        result = pm.train_step(own, target)
        assert abs(result.loss - loss) < 1e-5 and abs(result.grad_norm / norm - 1) < 1e-4, (result, loss, norm)
    agree()
    pm.save_checkpoint("saved")
    pm.load_state_dict(model.state_dict())
    try:
        pm.train_step(own, target[: 4 - rank % 2])
        raise SystemExit("a target of another size was accepted")
    except autopar.UsageError as error:
        assert "target" in str(error), error
    pm.load_checkpoint("saved")
    agree()
    reference.forward_backward(x, y, 2, 4)
    reference.step()
    pm.train_step(own, target)
    agree()
    pm.eval()
    reference.model.eval()
    assert_close(pm(own), replica_part(reference.model(x).detach(), pm), "output")
print(f"rank {rank} agrees", flush=True)
"""


def test_groups_of_replicas_that_share_parameters_have_the_numbers_of_one_device(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(GROUPS)
    done = run_ranks(4, tmp_path / "script.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"rank \d agrees", done.stdout)) == 4


SHARDS = """
import os, sys
import torch
from support import traces; traces.share()
from support.handmade import plan_by_hand
from support.reference import Reference, assert_all_close
from support.models import Tied
import autopar

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = Tied()
x, y = torch.randint(0, 32, (8, 5)), torch.randint(0, 32, (8,))
sgd = lambda p: torch.optim.SGD(p, lr=0.1)
reference = Reference(model, make_optimizer=sgd)
plan = plan_by_hand(
    model, x, 2, [], tp=2, strategies={"layers.*.*.linear": "n"}, shardings={"layers.0.1.weight": "tp:0"}
)

def refused(x, y, message):
    try:
        pm.train_step(x, y)
        raise SystemExit(f"accepted: {message}")
    except autopar.UsageError as error:
        assert message in str(error), error

with autopar.parallelize(model, 2, x, optimizer=sgd, plan=plan) as pm:
    assert (pm.data_rank, pm.data_size) == (0, 1)
    refused(x[: 4 + rank], y[: 4 + rank], "different sizes: 4 on data rank 0, 5 on data rank 0")
    refused(x.roll(rank, 0), y, "Ranks 0 and 1 were given different inputs or targets, but share each operation (tp=2)")
    refused(x, y.roll(rank), "Ranks 0 and 1 were given different inputs or targets")
    reference.forward_backward(x, y, 2)
    reference.step()
    pm.train_step(x, y)
    assert_all_close(pm.state_dict(), dict(reference.model.state_dict()), "state")
print(f"rank {rank} agrees", flush=True)
"""


def test_ranks_that_share_operations_need_the_same_samples(tmp_path: Path) -> None:
    assert_both_ranks_agree(run_on_two(tmp_path, SHARDS))


DISAGREEING = """
import os, torch, autopar
from torch import nn
from support.handmade import plan_by_hand
model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 8)
plan = plan_by_hand(model, x, 2 if os.environ["RANK"] == "0" else 4, ["2.linear"])
autopar.parallelize(model, 2, x, plan=plan)
"""


def test_ranks_that_are_given_different_plans_are_told(tmp_path: Path) -> None:
    done = run_on_two(tmp_path, DISAGREEING)
    assert done.returncode != 0
    said = "The 2 ranks do not run the same plan: rank 0 has 2 microbatches; rank 1 has 4 microbatches. Pass the same"
    assert said in done.stderr, done.stderr[-3000:]


DIFFERENT_CALLS = """
import functools, os
import torch
from support import traces; traces.share()
from support.handmade import plan_by_hand
from support.reference import Reference, assert_all_close
from support.models import Tied
import autopar

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = Tied()
x, y = torch.randint(0, 32, (8, 5)), torch.randint(0, 32, (8,))
plan = plan_by_hand(model, x, 2, [], dp=2)
sgd = functools.partial(torch.optim.SGD, lr=0.1)
plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)

def refused(call, message):
    try:
        call()
        raise SystemExit(f"accepted: {message}")
    except autopar.UsageError as error:
        assert message in str(error), error

def start(**options):
    given = dict(optimizer=sgd, lr_scheduler=plateau, plan=plan, compile=False, seed=1) | options
    return autopar.parallelize(model, 2, x, **given)

alone = (lambda output, target: output.sum()) if rank else None
for options, mine in (
    (dict(seed=rank), f"rank {rank} has seed {rank}; "),
    (dict(clip_grad_norm=[None, 0.5][rank]), "rank 1 has clip_grad_norm 0.5"),
    (dict(loss_fn=alone), "rank 1 has loss_fn __main__.<lambda> of line"),
    (dict(optimizer=functools.partial(sgd, momentum=rank)), "momentum=1"),
    (dict(optimizer=lambda own: torch.optim.SGD(own, lr=0.1, momentum=rank)), "has momentum 1 in parameter group 0"),
    (dict(optimizer=lambda own: [torch.optim.SGD, torch.optim.AdamW][rank](own)), "optimizer torch.optim.adamw.AdamW"),
    (dict(lr_scheduler=lambda own: plateau(own, factor=0.1 + rank / 10)), f"rank {rank} has factor 0.{1 + rank} of lr"),
):
    refused(lambda: start(**options), mine)

with start() as pm:
    own = [tensor.chunk(2)[rank] for tensor in (x, y)]
    reference = Reference(model, make_optimizer=sgd)

    def step():
        pm.train_step(*own)

    def same_steps():
        for _ in range(2):
            step()
            reference.forward_backward(x, y, 2, 2)
            reference.step()
        assert_all_close(pm.state_dict(), dict(reference.model.state_dict()), "state")

    same_steps()
    pm.save_checkpoint("saved")
    # Calls that are compared late.
    pm.lr_scheduler.step(1.0)
    pm.lr_scheduler.step(0.5 + rank)
    refused(step, "step(0.5) and then train_step in train mode on rank 0, lr_scheduler.step(1.5) and then train_step")
    pm.load_checkpoint("saved")
    if rank == 0:
        pm.lr_scheduler.step(1.0)
        pm.zero_grad()
    refused(step, "on rank 0, train_step in train mode on rank 1. Each rank has carried out all but its last call, so")
    pm.load_checkpoint("saved")
    same_steps()
    # Calls in which ranks wait for each other.
    for name, *arguments in (
        ("save_checkpoint", "other"), ("load_checkpoint", "saved"), ("state_dict",), ("gradients",), ("stats",),
        ("load_state_dict", model.state_dict()), ("data_sum", [1.0]), ("any_rank", True), ("broadcast_from_rank0", ""),
    ):
        call = functools.partial(getattr(pm, name), *arguments)
        refused(step if rank else call, f"The ranks make different calls: {name}")
        refused(call if rank else step, f"calls: train_step in train mode on rank 0, {name}")
    refused(lambda: pm.save_checkpoint(f"of rank {rank}"), "save_checkpoint(of rank 1, keep=1) on rank 1. Nothing has")
    refused(lambda: pm.save_checkpoint("other", {rank} if rank else 0), "extra cannot be saved: Object of type set")
    pm.learning_rates() if rank else pm.loss_scale()  # wait for nobody
    assert sorted(os.listdir()) == ["saved", "script.py"], os.listdir()
    same_steps()
print(f"rank {rank} agrees", flush=True)
"""


def test_calls_and_recipes_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    assert_both_ranks_agree(run_on_two(tmp_path, DIFFERENT_CALLS))


FOLDER = """
import os
from pathlib import Path
import torch
from torch import nn
import autopar
from autopar.train import Checkpoints, JsonLog, Trainer

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
folder = Path(f"of rank {rank}")  # each rank has a disk of its own, and rank 0's holds a run
if rank == 0:
    folder.mkdir()
    (folder / "steps.jsonl").write_text("{}")
batches = torch.utils.data.DataLoader([(torch.randn(3), 1)] * 8, batch_size=4)
model, sgd = nn.Linear(3, 2), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
with autopar.parallelize(model, 2, torch.empty(8, 3), optimizer=sgd, dp=2) as pm:
    for callback in (JsonLog(folder), Checkpoints(folder)):
        try:
            Trainer(pm, batches, epochs=1, callbacks=(callback,)).fit()
            raise SystemExit("another run was accepted")
        except autopar.UsageError as error:
            assert str(error).startswith("of rank 0 holds a run already: steps.jsonl of 1 update. It has no"), error
    assert folder.exists() == (rank == 0)
    Trainer(pm, batches, epochs=1, callbacks=(JsonLog(Path("new")), Checkpoints(Path("new")))).fit()
assert (Path("of rank 0") / "steps.jsonl").read_text() == "{}"
print(f"rank {rank} agrees", flush=True)
"""


def test_every_rank_hears_that_a_folder_holds_a_run(tmp_path: Path) -> None:
    assert_both_ranks_agree(run_on_two(tmp_path, FOLDER))
    assert len((tmp_path / "new" / "steps.jsonl").read_text().splitlines()) == 2


CALLER_MODES = """
import os, sys
import torch, torch.distributed as dist
from support import traces; traces.share()
from support.caller_modes import MODES, SETTINGS, assert_equal, results

torch.set_num_threads(1)
dist.init_process_group()  # of any backends
expected = torch.load("one.pt")
for name in sys.argv[1].split(","):
    for place in ("everything", "one step") if name in MODES else ("one step",):
        assert_equal(results(2, {**MODES, **SETTINGS}[name], place, pp=2), expected, f"{name} around {place}")
dist.destroy_process_group()
print(f"rank {os.environ['RANK']} agrees", flush=True)
"""
OTHERS = ",".join([name for name in (*MODES, *SETTINGS) if name != "autocast"])


@pytest.mark.full
@pytest.mark.parametrize("names", ["autocast", pytest.param(OTHERS, id="others")])
def test_modes_of_the_caller_do_not_reach_its_rank(tmp_path: Path, names: str) -> None:
    torch.save(results(1, torch.enable_grad, "everything"), tmp_path / "one.pt")
    assert_both_ranks_agree(run_on_two(tmp_path, CALLER_MODES, names))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::autopar.AutocastWarning")
@pytest.mark.parametrize("name", [*MODES, *SETTINGS])
def test_modes_of_the_caller_do_not_reach_worker_processes(name: str) -> None:
    mode = {**MODES, **SETTINGS}[name]
    for place in PLACES:
        assert_equal(results(2, mode, place, pp=2), results(1, mode, place), f"{name} around {place}")
