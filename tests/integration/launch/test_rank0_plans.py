"""Rank 0 of a launcher plans for all ranks, and an error of any rank is raised on all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.forks import run_on_two

COMMON = """
import dataclasses, json, os, sys, time
from contextlib import nullcontext
from pathlib import Path
import pytest
import torch
from torch import nn
from support import traces; traces.share()
from support.reference import Reference, assert_all_close
import autopar
import autopar.api.parallelize
from autopar.api.planning import plan as planning
from autopar.measure.regions import region_times as timing
from autopar.measure.regions.cache import RegionTimes
from autopar.runtime.launch.devices import Machine, RankDevice

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
torch.manual_seed(0)
def mlp(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
model = mlp()
x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
said = []

def trained(**options):
    with autopar.parallelize(model, 2, x, optimizer=sgd, **options) as pm:
        reference = Reference(model, make_optimizer=sgd)
        for _ in range(2):
            part = [tensor.chunk(pm.data_size)[pm.data_rank] for tensor in (x, y)]
            loss = reference.forward_backward(x, y, pm.plan.microbatches, pm.plan.mesh.dp)
            assert abs(pm.train_step(*part).loss - loss) < 1e-5
            reference.step()
        assert_all_close(pm.state_dict(), dict(reference.model.state_dict()), "state")
        said.append(pm.plan.to_json())

def refused(kind, **options):
    begin = time.monotonic()
    try:
        autopar.parallelize(*options.pop("model", [model]), 2, **dict(example_inputs=x) | options)
        raise SystemExit(f"accepted: {options}")
    except kind as error:
        assert type(error) is kind
        said.append(str(error))
    assert time.monotonic() - begin < 20, "told late"

def write():
    Path(f"of rank {rank}").write_text(json.dumps(said))
    print(f"rank {rank} agrees", flush=True)
"""

PLANS = """
search = planning.search
if rank == 1:  # its clock would end the solver at once, if it planned
    def hurried(*arguments, **named):
        said.append("planned")
        limits = planning.Constraints
        limited = [dataclasses.replace(a, solver_seconds=1e-9) if isinstance(a, limits) else a for a in arguments]
        return search(*limited, **named)
    planning.search = hurried

trained(pp=2, microbatches=4)
trained(dp=2)
write()
"""

MEASURED = """
timing.MAX_STEADY_SPREAD = 99.0  # while other tests use the processors
if sys.argv[1] == "stand-in":
    def run(self, programs, keep, what, limit=None):
        for key, (program, _) in programs.items():
            keep(key, RegionTimes(1e-6 * len(program.ops), 1e-6, 0.01))
        return ""
    timing.RegionTimer.measure_programs = run
if rank == 1:
    timing.RegionTimer.measure_programs = None  # it never measures
    os.environ["AUTOPAR_CACHE"] = "another disk"

trained(cost="measured", dp=2)
trained(dp=2)
trained(cost="analytic", dp=2)
trained(measure_seconds=60)
write()
"""

ERRORS = """
refused(autopar.InfeasibleError, memory=1000)
refused(autopar.HardwareError, hardware="no-such-machine")
refused(autopar.UsageError, cost="measured", hardware="h200-nvlink")
refused(autopar.UsageError, model=[mlp(16 + 16 * rank)])
refused(autopar.UsageError, microbatches=2 + 2 * rank)
refused(autopar.UsageError, example_inputs=torch.randn(8 + 8 * rank, 8))

class Loops(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x

for failing in (0, 1):
    refused(autopar.TraceError, model=[nn.Sequential(model, Loops()) if rank == failing else model])
    refused(autopar.UsageError, optimizer=(lambda parameters: None) if rank == failing else sgd)
    module, whole = autopar.api.parallelize, autopar.api.parallelize.ProgramCache
    def fail(*arguments):  # the plan does not fit this rank's graph
        raise autopar.PlanError("Plan field stages: no such operation.")
    module.ProgramCache = fail if rank == failing else whole
    refused(autopar.PlanError)
    module.ProgramCache = whole

Machine.rank_device = lambda *arguments: RankDevice(f"CPU {rank}", (4 - rank) * 2**30)
refused(autopar.UsageError)
with pytest.warns(UserWarning, match="planned for the least") if rank == 0 else nullcontext():
    trained(hardware="cpu-generic")  # ranks go on after errors
write()
"""


def said_by_ranks(folder: Path, script: str, *arguments: str) -> list[Any]:
    """What each of two ranks has written, in order."""
    done = run_on_two(folder, COMMON + script, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(re.findall(r"rank \d agrees", done.stdout)) == ["rank 0 agrees", "rank 1 agrees"]
    return [json.loads((folder / f"of rank {rank}").read_text()) for rank in range(2)]


def test_all_ranks_run_rank_0s_plan(tmp_path: Path) -> None:
    first, other = said_by_ranks(tmp_path, PLANS)
    assert first == other and [json.loads(plan)["mesh"]["pp"] for plan in first] == [2, 1]


@pytest.mark.parametrize("how", ["stand-in", pytest.param("real", marks=pytest.mark.full)])
def test_rank_0_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "times"))
    first, other = said_by_ranks(tmp_path, MEASURED, how)
    assert first == other
    costs = [json.loads(plan)["hardware"]["cost"] for plan in first]
    assert costs[:3] == ["measured", "measured", "analytic"]  # auto takes what was measured before
    assert json.loads(first[3])["solver"]["measuring"]["budget_seconds"] == 60
    assert not (tmp_path / "another disk").exists()


SAME = (  # beginnings of the texts of rank 0's errors
    "No plan fits: stage 0 needs ",
    "No cost model is named 'no-such-machine'.",
    "cost='measured' (--cost measured) times operations on the device at hand, but cost model h200-nvlink is of ",
    "The 2 ranks do not have the same model: rank 0 has 0.weight (16, 8) float32, 0.bias (16,) float32, 2.weight (16,",
    "The 2 ranks do not have the same arguments: rank 0 has microbatches 2; rank 1 has microbatches 4. Pass the same ",
    "The 2 ranks do not have the same arguments: rank 0 has input 0 float32[8, 8]; rank 1 has input 0 float32[16, 8].",
)
OWN = ("Cannot trace Sequential", "optimizer=<lambda> returns a NoneType", "Plan field stages: no such operation.")


def test_an_error_is_raised_on_all_ranks(tmp_path: Path) -> None:
    first, other = said_by_ranks(tmp_path, ERRORS)
    expected = [
        *SAME,
        *OWN,
        *(f"Rank 1: {text}" for text in OWN),
        "The 2 ranks have different devices: CPU 0 on rank 0;",
    ]
    assert len(first) == len(expected) + 1
    for text, there, start in zip(first, other, expected):
        assert text.startswith(start)
        assert there == text.removeprefix("Rank 1: ")
    assert first[-1] == other[-1] and json.loads(first[-1])["hardware"]["memory_bytes"] == 3 * 2**30
