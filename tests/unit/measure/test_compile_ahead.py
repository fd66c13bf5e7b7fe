"""Regions that other processes compile before a rank runs them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen.compile import Argument, CompiledRegion, RegionCode, RegionSource
from autopar.errors import CompileAheadWarning, UsageError
from autopar.measure import compile_ahead as ahead
from autopar.measure.compile_ahead import WORKERS, compile_ahead, prepare_compilers
from autopar.measure.workers import WorkersExit

CPU = torch.device("cpu")
SCRIPT = """
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import mse_loss

import autopar


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*[nn.LayerNorm(8), nn.Tanh()] * 4) for _ in range(2))
        self.wide = nn.ModuleList(nn.Sequential(*[nn.LayerNorm(16), nn.Tanh()] * 4) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = torch.cat([x, x], -1)
        for block in self.wide:
            x = block(x)
        return x


def main():
    x, y = torch.randn(4, 3, 8), torch.randn(4, 3, 16)
    with autopar.parallelize(
        Blocks(), 1, x, loss_fn=mse_loss, optimizer=torch.optim.SGD, microbatches=1, compile=True, cost="analytic",
        recompute=sys.argv[1],
    ) as pm:
        print("loss", pm.train_step(x, y).loss)
    found = counters["inductor"]
    print("hits", found["fxgraph_cache_hit"], "misses", found["fxgraph_cache_miss"])


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
"""


def run(folder: Path, workers: str, recompute: str) -> list[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    variables = {WORKERS: workers, "TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache-{workers}")}
    done = subprocess.run(
        [sys.executable, script, recompute], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-2:]


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_a_rank_finds_what_workers_compiled(recompute: str, tmp_path: Path) -> None:
    loss, counts = run(tmp_path, "0", recompute)
    assert not counts.endswith("misses 0")
    ahead_loss, ahead_counts = run(tmp_path, "2", recompute)
    assert ahead_counts.endswith(" misses 0") and not ahead_counts.startswith("hits 0")
    assert ahead_loss == loss


@pytest.mark.parametrize(
    ("requested", "device", "cores", "regions", "lines", "workers"),
    [
        (None, "cuda", 16, 13, 50, 13), (None, "cuda", 4, 10, 50, 4), (None, "cuda", 16, 3, 200, 3),
        (None, "cuda", 16, 13, 25, 0), (None, "cuda", 16, 2, 300, 0), (None, "cuda", 3, 13, 50, 0),
        (None, "cpu", 16, 13, 50, 0), ("0", "cuda", 16, 13, 50, 0), ("1", "cuda", 16, 13, 50, 0),
        ("8", "cuda", 2, 13, 50, 8), ("8", "cuda", 16, 3, 1, 3), ("8", "cpu", 16, 3, 1, 3), ("8", "cuda", 16, 2, 50, 0),
    ],
)  # fmt: skip
def test_numbers_of_workers(
    requested: str | None, device: str, cores: int, regions: int, lines: int, workers: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The server starts before planning, where there may be workers, and ends if there are none."""
    servers, started = list[str](), list[int]()

    def run_workers(entry: str, work: ahead.Work, number: int, *_: object, **__: object) -> WorkersExit:
        started.append(number)
        return WorkersExit((), (), False)

    monkeypatch.delenv(WORKERS, raising=False)
    if requested is not None:
        monkeypatch.setenv(WORKERS, requested)
    monkeypatch.setattr(ahead, "run_workers", run_workers)
    monkeypatch.setattr(ahead, "start_server", lambda: servers.append("started"))
    monkeypatch.setattr(ahead, "server", "started before planning")
    monkeypatch.setattr(ahead, "cores", lambda: cores)
    monkeypatch.setattr(ahead, "done_file", lambda region, state: tmp_path / region.code.strip())
    prepare_compilers(device)
    assert bool(servers) == (int(requested) > 1 if requested else device == "cuda" and cores > 3)
    source = replace(code_of(nn.Parameter(torch.empty(3, 4))).source, device=torch.device(device))
    servers.clear()
    compile_ahead([replace(source, code=str(k) + "\n" * lines) for k in range(regions)])
    assert started == ([workers] if workers else []) and len(servers) == len(started) and ahead.server is None


def test_a_number_of_workers_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKERS, "many")
    source = code_of(nn.Parameter(torch.empty(3, 4))).source
    for call in (partial(prepare_compilers, "cuda"), lambda: compile_ahead([source])):
        with pytest.raises(UsageError, match="AUTOPAR_COMPILE_WORKERS='many' must be a number of processes"):
            call()


def test_regions_are_left_to_a_rank_whose_workers_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(WORKERS, "2")
    monkeypatch.setattr("autopar.measure.compile_ahead.PRELOADED", ("no_such_module",))
    source = code_of(nn.Parameter(torch.empty(3, 4))).source
    regions = [replace(source, options={"number": k}) for k in range(3)]
    with pytest.warns(
        CompileAheadWarning, match="this one compiles in their place: (?s:.*)No module named 'no_such_module'"
    ):
        compile_ahead(regions)
    assert not list(tmp_path.glob("autopar/*"))


def test_weights_that_are_compiled_for_lie_where_they_will_be() -> None:
    """Backwards for GPUs have offsets of weights, which share a storage, in their keys."""
    storage = torch.empty(100)
    weight = nn.Parameter(storage[20:32].view(3, 4))
    region = CompiledRegion(code_of(weight), [weight], None)
    region.code.first = weakref.ref(region)
    source = region.code.stored_source()
    assert source is not None and source.arguments[0].storage == (20, 400) and source.arguments[1].storage is None
    with FakeTensorMode():
        fake = source.arguments[0].fake(CPU)
    assert (fake.storage_offset(), fake.untyped_storage().nbytes(), fake.stride()) == (20, 400, (4, 1))
    del region, fake
    gc.collect()
    assert code_of(weight).stored_source() is None


def code_of(weight: nn.Parameter) -> RegionCode:
    taken = Argument((3, 4), torch.float32, (4, 1), True), Argument((2, 4), torch.float32, (4, 1), False)
    source = RegionSource(partial(fx.symbolic_trace, nn.Identity()), "", taken, {}, CPU)
    return RegionCode(source)
