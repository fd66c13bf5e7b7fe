"""Constraints, checked once; and what may stand beside a given plan."""

from __future__ import annotations

import warnings
from dataclasses import fields
from functools import partial
from typing import Any, get_type_hints

import pytest
import torch
from support.effort import only
from support.handmade import plan_by_hand
from torch import nn

import autopar
from autopar import UsageError
from autopar.api.options import RUN_SETTINGS, Options, parse_bytes
from autopar.ir.plan_constraints import PlanConstraints
from autopar.tools.cli.flags import BuildFlags, PlanFlags, RunFlags
from autopar.trace.passes.precision import apply_precision, model_precision
from autopar.trace.trace import trace


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout": -1}, "timeout=-1 must be a number above 0"),
        ({"checkpoint_timeout": 0}, "checkpoint_timeout=0 must be a number above 0"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0 must be"),
        ({"memory": True}, "memory=True must be"),
        ({"memory": "24"}, "Write a number and a unit"),
        ({"microbatches": 2.5}, "whole number"),
        ({"tp": 0}, "tp=0 must be a whole number of at least 1"),
        ({"dp": True}, "dp=True must be a whole number"),
        ({"zero": "yes"}, "zero='yes' is no ZeRO stage. It is 0, 1, 2 or 3"),
        ({"zero": True}, "zero=True is no ZeRO stage"),
        ({"zero": 4}, "zero=4 is no ZeRO stage"),
        ({"zero1": True}, r"Unknown argument 'zero1'\. Did you mean zero\?"),
        ({"schedule": "1f1b", "chunks": 2}, "'interleaved-overlap', 'zb-v', 'searched' or 'auto'"),
        ({"recompute": "some"}, "recompute='some' is unknown. It is one of none, all, auto"),
        ({"reduce_dtype": "float16"}, "reduce_dtype='float16' is unknown. It is one of float32, bfloat16"),
        ({"schedule": "zigzag"}, "1f1b, gpipe, interleaved, interleaved-overlap, zb-h1, zb-v, searched, auto"),
        ({"microbatch": 4}, "Did you mean microbatches"),
        ({"microbatches": 2, "microbatch_size": 2}, "not both"),
    ],
)
def test_impossible_options(given: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Options.of(given)


def test_the_mesh_is_left_to_the_planner() -> None:
    assert (Options().pp, Options().tp, Options().dp, Options().zero) == (None,) * 4
    assert Options.of({"tp": 2, "dp": 4, "zero": 0}) == Options(tp=2, dp=4, zero=0)
    assert Options.of({"zero": "auto"}) == Options()


@pytest.mark.parametrize(
    ("name", "asked"),
    only(
        [("vit_tiny_patch16_224", {"pp": 4})],
        [
            ("vit_tiny_patch16_224", {"pp": 4}),
            ("vit_small_patch16_224", {"memory": "300MiB"}),
            ("resnet18", {"pp": 4}),
            ("convnext_atto", {"pp": 2, "tp": 2}),
        ],
    ),
    ids=str,
)
def test_the_default_schedule_is_no_slower_than_1f1b(name: str, asked: dict[str, Any]) -> None:
    asked = asked | {"batch_size": 64, "hardware": "rtx4090-pcie"}
    chosen, single = autopar.plan(name, 4, **asked), autopar.plan(name, 4, **asked, schedule="1f1b")
    assert chosen.prediction.step_seconds <= single.prediction.step_seconds * (1 + 1e-9)
    limit = parse_bytes(asked.get("memory", "24GiB"))
    assert max(chosen.prediction.peak_bytes) <= limit
    # Batch norm has at least 8 samples.
    assert name != "resnet18" or chosen.microbatch_size >= 8


def test_a_save_may_take_longer_than_a_step() -> None:
    asked = [{}, {"timeout": 5}, {"timeout": 7200}, {"timeout": 7200, "checkpoint_timeout": 60}]
    assert [Options.of(options).checkpoint_seconds for options in asked] == [3600, 3600, 7200, 60]


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("24GiB", 24 * 2**30), ("80 GB", 80 * 10**9), ("1.5KiB", 1536), ("7B", 7)]
)
def test_bytes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes
    assert Options.of({"memory": text}).memory == num_bytes


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("constraint", [{"schedule": "gpipe"}, {"pins": {"0": 0}}, {"hardware": "cpu-generic"}])
def test_nothing_that_the_plan_decides_stands_beside_it(constraint: dict) -> None:
    x = torch.randn(4, 8)
    plan = plan_by_hand(mlp(), x, 2, [])
    with pytest.raises(UsageError, match=f"Both plan= and {next(iter(constraint))}= are given"):
        autopar.parallelize(mlp(), 1, x, plan=plan, **constraint)
    with autopar.parallelize(mlp(), 1, x, plan=plan, timeout=30.0) as pm:
        assert pm(x).shape == (4, 4)


@pytest.mark.parametrize("model", [3, lambda x: x])
def test_only_modules_are_parallelized(model: object) -> None:
    with pytest.raises(UsageError, match=r"must be a torch\.nn\.Module"):
        autopar.parallelize(model, 2, torch.randn(4, 8))  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_model_that_computes_nothing_is_refused(devices: int) -> None:
    with pytest.raises(UsageError, match="Identity computes nothing, so there is nothing to divide"):
        autopar.plan(nn.Identity(), devices, torch.randn(4, 8), hardware="cpu")


def test_microbatches_that_come_out_otherwise_are_a_warning_where_a_number_was_given() -> None:
    model, x = mlp(), torch.randn(8, 8)
    with pytest.warns(autopar.MicrobatchWarning, match=r"^microbatches=5 becomes 4 microbatches of 2: .* 8 samples"):
        assert autopar.plan(model, 2, x, microbatches=5, dp=1).microbatches == 4
    with pytest.warns(autopar.MicrobatchWarning, match=r"^microbatch_size=3 becomes 2 microbatches of 2: each of 2"):
        assert autopar.plan(model, 2, x, microbatch_size=3, dp=2).microbatches == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.MicrobatchWarning)
        for asked in ({}, {"microbatches": 3, "dp": 1}, {"microbatch_size": 4}, {"dp": 2}):
            autopar.plan(model, 2, x, **asked)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("precision", [None, "bf16-params"])
def test_hooks_on_weights_are_refused_and_a_run_leaves_none(precision: str | None) -> None:
    model, x = mlp(), torch.randn(4, 8)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    with autopar.parallelize(model, 1, x, optimizer=optimizer, microbatches=2, precision=precision) as pm:
        pm.train_step(x, torch.zeros(4, dtype=torch.int64))
        autopar.plan(model, 2, x, precision=precision)
    autopar.plan(model, 2, x, precision=precision)
    model.get_parameter("2.bias").register_hook(lambda gradient: 0 * gradient)
    for refusing in (autopar.plan, autopar.parallelize):
        with pytest.raises(autopar.TraceError, match=r"Sequential: its parameter 2\.bias has a hook .*register_hook"):
            refusing(model, 2, x, precision=precision)


def test_precision_is_the_models_own() -> None:
    graph = trace(mlp().double(), (torch.randn(2, 8, dtype=torch.float64),))
    assert model_precision(graph) == "fp64"
    assert apply_precision(graph, None) is apply_precision(graph, "fp64") is graph
    with pytest.raises(UsageError, match=r"precision='bf16', but the parameters of Sequential are fp64"):
        apply_precision(graph, "bf16")


def test_a_single_process_of_a_launcher_is_a_plain_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    from autopar.runtime.launch.environment import launched

    assert launched() is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = launched()
    assert found is not None and (found.rank, found.world, found.local_world) == (0, 4, 4)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match=r"RANK=0 and WORLD_SIZE=4 .* MASTER_ADDR does not say where they meet"):
        autopar.parallelize(mlp(), 4, torch.randn(4, 8))


def test_a_scripted_model_is_refused() -> None:
    scripted: Any = torch.jit.trace(mlp(), torch.randn(4, 8))
    with pytest.raises(UsageError, match=r"is a torch\.jit\.ScriptModule.*Pass the module before"):
        autopar.plan(scripted, 2, torch.randn(4, 8))


@pytest.mark.parametrize("asked", [{"cuda_graph": True}, {"transport": "nccl"}, {"transport": "symmetric"}])
def test_what_only_gpus_have_is_refused_elsewhere_before_planning(asked: dict) -> None:
    message = rf"^{next(iter(asked))}={next(iter(asked.values()))!r} needs GPUs; this run has CPU processes and Gloo\."
    Options(**asked).check_machine("cuda")
    Options(cuda_graph=False, transport="auto").check_machine("cpu")
    with pytest.raises(UsageError, match=message):
        autopar.parallelize(nn.Linear(4, 4), 2, torch.randn(4, 4), backend="gloo", **asked)


def test_flags_are_the_constraints_by_their_names() -> None:
    constraints, flags = get_type_hints(PlanConstraints), get_type_hints(PlanFlags)
    assert {*flags} - {"pin"} == {*constraints} - {"pins", "solver_seconds", "channels_last"}
    assert BuildFlags(channels_last=False).layout() == {"channels_last": False} and BuildFlags().layout() == {}
    whole = [{name for name, hint in hints.items() if hint == int | None} for hints in (flags, constraints)]
    assert whole[0] - {"zero"} == whole[1] - {"memory"}  # a number of a few; a text with a unit
    assert set(get_type_hints(RunFlags)) <= RUN_SETTINGS
    assert {f.name for f in fields(Options)} - {*constraints} == RUN_SETTINGS
