"""Why a plan is as fast as it is: the parts of its step, what bounds it, why not another one, what two differ by."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.block_chains import blocks, plan_for
from support.cli import USER_MODELS, invoke

import autopar
from autopar.api.model_source import ModelSource
from autopar.errors import PlanError, UsageError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import (
    Alternative,
    HardwareInfo,
    InputInfo,
    Message,
    ModelInfo,
    Prediction,
    SolverInfo,
    Stage,
    StageMemory,
)
from autopar.ir.text import rendered
from autopar.ir.units import BYTES, text
from autopar.schedule.generate import generate
from autopar.schedule.simulate import simulate
from autopar.solve.space.constraints import Constraints, memory_for
from autopar.tools.cli.why_not_args import parse_constraints
from autopar.tools.explain.advice import explained
from autopar.tools.explain.breakdown import Pipeline, breakdown_of
from autopar.tools.explain.diff import difference
from autopar.tools.report.explain_table import explanation_parts

GIB = 2**30
VIT = ModelSource(
    "vit_tiny_patch16_224",
    {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 48, "num_heads": 3, "num_classes": 10},
    (16, 3, 32, 32),
)
RESNET = ModelSource("resnet18", {"num_classes": 10}, (16, 3, 32, 32))
MIXER = ModelSource("mixer_s32_224", {"img_size": 64, "num_classes": 10}, (16, 3, 64, 64))


@cache
def planned(source_name: str, devices: int, *given: tuple[str, Any]) -> Plan:
    """A plan of one of the models above, for GPUs."""
    source = next(s for s in (VIT, RESNET, MIXER) if s.name == source_name)
    return autopar.plan(source, devices, hardware="h200-nvlink", **dict(given))


def by_hand(
    times: Sequence[tuple[float, float]],
    microbatches: int = 8,
    hop_seconds: float = 0.0,
    peak_gib: float = 1.0,
    **changes: Any,
) -> Plan:
    """A pipeline of stages with the given forward and backward seconds, and the step that these make."""
    pp = len(times)
    stages = tuple(
        Stage(f"blocks.{i}.first.linear", f"blocks.{i}.last.linear", (i,), 7, f, b, 0, int(peak_gib * GIB),
              memory=StageMemory(int(peak_gib * GIB / 2), int(peak_gib * GIB / 8), int(peak_gib * GIB / 4)))
        for i, (f, b) in enumerate(times)
    )  # fmt: skip
    hops = [(s, s + 1) for s in range(pp - 1)]
    plan = Plan(
        model=ModelInfo("m", "0123", 7, (InputInfo("x", (64, 3), "float32"),)),
        batch=64,
        mesh=Mesh(pp),
        schedule="1f1b",
        microbatches=microbatches,
        stages=stages,
        prediction=Prediction(1.0, 64.0, 0.0, (int(peak_gib * GIB),) * pp, 0.1),
        solver=SolverInfo("by hand", "by hand", 0.0, 0.0),
        hardware=HardwareInfo("box", "GPU", "wire", 10 * GIB),
        messages=tuple(Message(a, b, 2**20, hop_seconds) for s, d in hops for a, b in ((s, d), (d, s))),
    )
    plan = replace(plan, **changes)
    plan = replace(plan, prediction=replace(plan.prediction, step_seconds=breakdown_of(plan).step_seconds))
    plan.validate()
    return plan


# -- the parts of a step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "devices", "given"),
    [
        (VIT, 4, {"pp": 4}),
        (VIT, 2, {"pp": 2, "microbatches": 5}),
        (VIT, 2, {"tp": 2, "hardware": None}),
        (VIT, 2, {"dp": 2, "zero1": True}),
        (VIT, 4, {"pp": 2, "tp": 2, "microbatches": 4}),
        (VIT, 4, {"pp": 2, "dp": 2, "zero1": False}),
        (VIT, 2, {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 4}),
        (VIT, 2, {"pp": 2, "schedule": "interleaved-overlap", "chunks": 3, "microbatches": 4}),
        (VIT, 2, {"pp": 2, "schedule": "gpipe", "microbatches": 4}),
        (VIT, 2, {"pp": 2, "recompute": "all", "microbatches": 2}),
        (VIT, 1, {}),
        (RESNET, 3, {"pp": 3, "microbatches": 2}),
    ],
    ids=str,
)
def test_parts_sum_to_the_predicted_step_at_every_position(source: Any, devices: int, given: dict[str, Any]) -> None:
    plan = planned(source.name, devices, *((k, v) for k, v in given.items() if v is not None))
    breakdown = breakdown_of(plan)
    step = plan.prediction.step_seconds
    assert len(breakdown.positions) == plan.mesh.pp
    for position in breakdown.positions:
        assert position.spent.seconds == pytest.approx(step, rel=1e-9)
        assert min(position.spent.by_name.values()) >= -1e-12 * step
        assert position.memory.peak_bytes == sum(position.memory.by_name.values())
        assert (position.spent.collective_seconds > 0) == (plan.mesh.tp > 1)
        assert (position.spent.transfer_seconds > 0) == (plan.mesh.pp > 1)
        assert (position.spent.recompute_seconds > 0) == (given.get("recompute") == "all")
    assert breakdown.step_seconds == pytest.approx(step, rel=1e-9)
    assert explained(plan).notes == () or "edited" not in explained(plan).notes[0]
    waiting = breakdown.spent.transfer_seconds + breakdown.spent.bubble_seconds
    pipeline = breakdown.spent.pipeline_seconds
    if len({s.optimizer_seconds for s in plan.stages}) == 1:
        assert waiting == pytest.approx(plan.prediction.bubble_fraction * pipeline, abs=1e-9 * step)


def test_waiting_for_transfers_is_what_free_ones_save() -> None:
    plan = by_hand([(1.0, 2.0), (1.5, 3.0), (1.0, 2.0)], microbatches=4, hop_seconds=0.5)
    times = ([1.0, 1.5, 1.0], [2.0, 3.0, 2.0])
    pairs = {(s, s + 1): 0.5 for s in range(2)} | {(s + 1, s): 0.5 for s in range(2)}
    schedule = generate("1f1b", 3, 4)
    timed, free = simulate(schedule, *times, pairs), simulate(schedule, *times)
    assert timed.step_seconds > free.step_seconds
    for rank, position in enumerate(breakdown_of(plan).positions):
        assert position.spent.compute_seconds == pytest.approx(timed.busy_seconds[rank])
        assert position.spent.transfer_seconds == pytest.approx(timed.step_seconds - free.step_seconds)
        assert position.spent.bubble_seconds == pytest.approx(free.step_seconds - free.busy_seconds[rank])


def test_the_end_of_a_step_is_each_positions_own_optimizer_and_waiting_for_the_last() -> None:
    plan = by_hand([(1.0, 2.0)] * 2, microbatches=2)
    stages = tuple(replace(s, optimizer_seconds=o) for s, o in zip(plan.stages, (1.0, 4.0)))
    prediction = replace(plan.prediction, step_seconds=9.0 + 5.0, reduce_seconds=1.0, optimizer_seconds=4.0)
    first, last = breakdown_of(replace(plan, stages=stages, prediction=prediction)).positions
    assert (first.spent.optimizer_seconds, first.spent.reduce_seconds, first.spent.bubble_seconds) == (1, 1, 3 + 3)
    assert (last.spent.optimizer_seconds, last.spent.reduce_seconds, last.spent.bubble_seconds) == (4, 1, 3)


def test_stages_without_any_time_are_explained() -> None:
    plan = by_hand([(1.0, 2.0)] * 2)
    idle = replace(plan, stages=tuple(replace(s, forward_seconds=0.0, backward_seconds=0.0) for s in plan.stages))
    assert breakdown_of(idle).step_seconds == 0
    assert "written or edited by hand" in explained(idle).notes[0]


# -- what bounds it ----------------------------------------------------------------------------------------------------


def test_a_slow_stage_bounds() -> None:
    said = explained(by_hand([(1.0, 2.0), (3.0, 6.0), (1.0, 2.0)], microbatches=32))
    assert said.headline == "compute of stage 1 (blocks.1.first … blocks.1.last), 80.0 % over the mean; bubble 45 %"
    even = next(h for h in said.suggestions if "even split" in h.text)
    assert even.step_seconds == pytest.approx(34 * 5.0)  # (32 + 3 - 1) slots of the mean stage


def test_a_slow_link_bounds_and_is_named() -> None:
    plan = by_hand([(1e-3, 2e-3)] * 3)
    slow = replace(
        plan, messages=tuple(replace(m, seconds=0.05) if {m.src, m.dst} == {1, 2} else m for m in plan.messages)
    )
    said = explained(slow)
    assert said.headline.startswith("transfers behind stage 1 (blocks.1.first … blocks.1.last), 97 % of its time")
    assert said.suggestions[0].text == "free transfers between ranks 1 and 2, now 2.00 MiB in 100.0 ms a microbatch"
    assert said.suggestions[0].step_seconds == pytest.approx(Pipeline.of(plan).seconds)


def test_few_microbatches_make_a_bubble_that_more_would_fill() -> None:
    plan = by_hand([(1.0, 2.0)] * 4, microbatches=2)
    said = explained(plan)
    assert said.headline.startswith("bubble of 4 stages with 2 microbatches; compute of stage 0")
    assert said.headline.endswith("bubble 60 %")  # 3 of 5 slots
    assert [h.text for h in said.suggestions] == ["4 microbatches instead of 2, if a sample takes as long then"]
    assert said.suggestions[0].step_seconds == pytest.approx((4 + 3) * 3.0 / 2)
    assert explained(replace(plan, batch=2, microbatches=2)).suggestions == ()  # of one sample each


def test_what_the_planner_priced_outranks_a_guess() -> None:
    plan = by_hand([(1.0, 2.0)] * 4, microbatches=2)
    faster = explained(replace(plan, alternatives=(Alternative("4 microbatches", 11.0, microbatches=4),)))
    assert [(h.text, h.step_seconds) for h in faster.suggestions] == [
        ("4 microbatches instead of 2, as the planner priced it", 11.0)
    ]
    slower = explained(replace(plan, alternatives=(Alternative("4 microbatches", 20.0, microbatches=4),)))
    assert slower.suggestions == () and slower.notes == (
        "Smaller microbatches would not help: 4 microbatches take 20.0 s.",
    )


def test_alternatives_with_the_plans_mesh_and_schedule_hold_their_microbatches() -> None:
    plan = planned(VIT.name, 4, ("pp", 2), ("dp", 2))
    assert {a.label: a.microbatches for a in plan.alternatives} == {
        "2 microbatches, ZeRO-1": 2, "1 microbatch, no ZeRO-1": 1, "equal parameters": None, "one device": None,
    }  # fmt: skip


def test_what_an_older_file_does_not_hold_is_guessed() -> None:
    plan = by_hand([(1.0, 2.0)] * 4, microbatches=2)
    data = json.loads(replace(plan, alternatives=(Alternative("4 microbatches", 20.0, microbatches=4),)).to_json())
    del data["alternatives"][0]["microbatches"]
    assert explained(Plan.from_json(json.dumps(data))) == explained(plan)


def test_memory_that_is_nearly_full_is_said() -> None:
    said = explained(by_hand([(1.0, 2.0)] * 2, microbatches=64, peak_gib=9.7)).headline
    assert said.endswith("; memory of rank 0 97 % full (9.70 GiB of 10.0 GiB, largest part weights + state)")
    assert "memory" not in explained(by_hand([(1.0, 2.0)] * 2, microbatches=64)).headline


def test_the_memory_limit_that_the_planner_found_comes_first() -> None:
    plan = by_hand([(1.0, 2.0)] * 2, microbatches=64)
    plan = replace(plan, prediction=replace(plan.prediction, peak_bytes=(GIB, 2 * GIB)))
    limited = replace(plan, seconds_without_limit=9e-3)
    limit = "memory of stage 1, without whose limit the step would take 9.0 ms"
    assert explained(limited).headline == f"{limit}; then {explained(plan).headline}"
    edited = replace(limited, prediction=replace(plan.prediction, step_seconds=1e-3))
    assert explained(edited).headline == explained(plan).headline


def test_explain_repeats_the_memory_limit_of_the_plan_text() -> None:
    plan = plan_for(blocks(8), Constraints(devices=2, batch=8, microbatches=8, memory=20 * GIB), saved=1.5)
    limit, then, _ = plan.bound_by.partition("; then ")
    assert limit.startswith("memory of stage 0, without whose limit") and explained(plan).headline.startswith(
        limit + then
    )
    older = json.loads(plan.to_json())
    del older["seconds_without_limit"]
    assert limit not in explained(Plan.from_json(json.dumps(older))).headline


def test_collectives_reduction_optimizer_and_recomputation_bound() -> None:
    stage = by_hand([(1.0, 2.0)], microbatches=4).stages[0]
    base = by_hand([(1.0, 2.0)], microbatches=4)
    tp = {"mesh": Mesh(1, 2), "prediction": replace(base.prediction, peak_bytes=(1, 1))}
    split = replace(base, stages=(replace(stage, ranks=(0, 1), collective_seconds=2.5),), **tp)
    assert explained(split).headline.startswith("collectives of 2 tensor-parallel ranks; compute of stage 0")
    dp = replace(tp["prediction"], reduce_seconds=20.0)
    shared = replace(base, mesh=Mesh(1, 1, 2), stages=(replace(stage, ranks=(0, 1)),), prediction=dp)
    assert explained(shared).headline.startswith("reduction of gradients over 2 replicas; compute of stage 0")
    assert [h.text for h in explained(shared).suggestions] == ["a reduction that backwards hide whole"]
    late = replace(
        base,
        stages=(replace(stage, optimizer_seconds=36.0),),
        prediction=replace(base.prediction, optimizer_seconds=36.0),
    )
    assert explained(late).headline.startswith("optimizer, 75 % of the step; compute of stage 0")
    again = explained(replace(base, stages=(replace(stage, recompute="all"),)))
    assert "recomputation 33 % of the step" in again.headline
    assert [(h.text, h.step_seconds) for h in again.suggestions] == [("memory enough to keep all activations", 8.0)]


# -- why not -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved(plan: Plan, name: str = "plan.json") -> str:
    plan.save(name)
    return name


def reported(*args: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    code, out, error = invoke("explain", *args, "--json")
    assert code == 0, error
    return json.loads(out)


@pytest.mark.parametrize(
    ("source", "asked", "given"),
    [
        (VIT, "tp=2", {"tp": 2}),
        (VIT, "pp=2,microbatches=4,recompute=all", {"pp": 2, "microbatches": 4, "recompute": "all"}),
        (VIT, "dp=2,zero1=false", {"dp": 2, "zero1": False}),
        (VIT, "precision=bf16", {"precision": "bf16"}),
        (RESNET, "pp=2,schedule=gpipe", {"pp": 2, "schedule": "gpipe"}),
        (RESNET, "chunks=2", {"chunks": 2, "schedule": "auto"}),
        (MIXER, "--tp=2", {"tp": 2}),
        (MIXER, "microbatch-size=4", {"microbatch_size": 4}),
    ],
    ids=str,
)
def test_why_not_finds_what_planning_finds(folder: Path, source: Any, asked: str, given: dict[str, Any]) -> None:
    plan, expected = planned(source.name, 2), planned(source.name, 2, *given.items())
    (answer,) = reported(saved(plan), "--why-not", asked)["why_not"]
    found = Plan.from_json(json.dumps(answer["plan"]))
    assert found.decision == expected.decision
    assert found.prediction == expected.prediction
    slower = expected.prediction.step_seconds / plan.prediction.step_seconds
    if found.decision == plan.decision:
        assert "that is the plan in the file" in answer["text"]
    elif slower >= 2:
        assert f"{slower:.1f} × as long" in answer["text"]
    elif slower > 1.001:
        assert f"{100 * (slower - 1):.1f} % slower" in answer["text"]
    assert sum(answer["breakdown"]["spent"].values()) == pytest.approx(found.prediction.step_seconds)


def test_why_not_plans_for_the_optimizer_that_is_named(folder: Path) -> None:
    file = saved(planned(VIT.name, 2))
    (plain,) = reported(file, "--why-not", "tp=2")["why_not"]
    (lean,) = reported(file, "--why-not", "tp=2", "--opt", "sgd")["why_not"]
    peaks = [max(answer["plan"]["prediction"]["peak_bytes"]) for answer in (plain, lean)]
    assert peaks[1] < peaks[0]  # momentum alone
    code, _, error = invoke("explain", file, "--why-not", "tp=2", "--opt", "sdg")
    assert code == 2 and "timm has no optimizer 'sdg'" in error
    code, _, error = invoke("explain", file, "--opt", "sgd")
    assert code == 2 and "--opt is for --why-not" in error


def test_why_not_plans_for_averages_of_weights(folder: Path) -> None:
    arguments = [f"{name}={value}" for name, value in VIT.kwargs.items()]
    flags = "--batch", "16", "--devices", "2", "--dp", "2", "--no-zero1", "--hardware", "h200-nvlink", "--model-kwargs"
    code, _, error = invoke("plan", VIT.name, "--model-ema", "-o", "averaged.json", *flags, *arguments)
    assert code == 0, error
    averaged, plain = Plan.load("averaged.json"), planned(VIT.name, 2, ("dp", 2), ("zero1", False))
    grown = max(averaged.prediction.peak_bytes) - max(plain.prediction.peak_bytes)
    assert grown == 4 * averaged.model.num_params
    (answer,) = reported("averaged.json", "--why-not", "dp=2,zero1=false", "--model-ema")["why_not"]
    assert "that is the plan in the file" in answer["text"]
    assert answer["plan"]["prediction"]["peak_bytes"] == list(averaged.prediction.peak_bytes)
    code, _, error = invoke("explain", "averaged.json", "--model-ema")
    assert code == 2 and "--model-ema is for --why-not" in error


def test_a_constrained_plan_that_is_faster_comes_with_its_command(folder: Path) -> None:
    stale = saved(planned(VIT.name, 2, ("pp", 2), ("microbatches", 16)))
    (answer,) = reported(stale, "--why-not", "dp=2")["why_not"]
    assert re.search(r"% faster than the plan in the file: that is not the best one", answer["text"])
    words = answer["command"].split()
    assert words[:2] == ["autopar", "plan"]
    code, _, error = invoke(*words[1:])
    assert code == 0, error
    assert Plan.load("plan.json").decision == planned(VIT.name, 2, ("dp", 2)).decision


def test_why_not_has_an_answer_where_nothing_fits_or_can_be_split(folder: Path) -> None:
    file = saved(planned(VIT.name, 2))
    answers = reported(file, "--why-not", "memory=64KiB", "--why-not", "pp=3", "--why-not", "dp=2,microbatches=9")
    small, three, many = answers["why_not"]
    assert re.search(r"No plan fits: .* needs [\d.]+ KiB|No plan fits: .* needs [\d.]+ MiB", small["text"])
    assert re.search(r"ranks? [01](–1)? ha(s|ve) 62.1 KiB \(97 % of 64.0 KiB\)", small["text"]), small["text"]
    assert "pp=3 needs a multiple of 3 devices, not 2" in three["text"]
    assert "microbatches=9, but each of 2 replicas has 8 samples" in many["text"]
    assert {a["plan"] for a in answers["why_not"]} == {None}


def test_the_reason_of_a_model_that_cannot_be_split(folder: Path) -> None:
    source = replace(VIT, kwargs={**VIT.kwargs, "num_classes": 7, "embed_dim": 39})
    plan = autopar.plan(source, 5, hardware="h200-nvlink", batch_size=20)
    (answer,) = reported(saved(plan), "--why-not", "tp=5")["why_not"]
    assert "tp=5: nothing in vit_tiny_patch16_224 can be split 5 ways" in answer["text"]


def test_a_limit_that_the_plan_was_made_with_stays(folder: Path) -> None:
    question = {"recompute": "none", "microbatches": 1, "dp": 2, "zero1": False}
    limit = memory_for(max(planned(VIT.name, 2, *question.items()).prediction.peak_bytes)) - 1
    plan = planned(VIT.name, 2, ("memory", limit))
    asked = "recompute=none,microbatches=1,dp=2,zero1=false"
    (answer,) = reported(saved(plan), "--why-not", asked)["why_not"]
    assert "No plan fits" in answer["text"] and f"(97 % of {text(limit, BYTES)})" in answer["text"], answer["text"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--why-not", "pt=2"], r"--why-not pt=2: unknown constraint 'pt'. Did you mean tp\? Known: memory, cost, "),
        (["--why-not", "hardware=x"], "unknown constraint 'hardware'"),
        (["--why-not", "tp"], "Cannot read --why-not 'tp'. Write NAME=VALUE"),
        (["--why-not", "tp="], "Cannot read --why-not 'tp='"),
        (["--why-not", "tp=two"], "--why-not tp=two: tp='two' is not a whole number"),
        (["--why-not", "zero1=perhaps"], "zero1='perhaps' is not true or false"),
        (["--why-not", "tp=0"], "tp=0 must be a whole number of at least 1"),
        (["--why-not", "tp=2,tp=4"], "--why-not tp=2,tp=4 gives tp two values, 2 and 4"),
        (["--why-not", "chunks=2,schedule=gpipe"], "chunks=2 with schedule='gpipe', under which each rank has one"),
        (["--why-not", "chunks=2,pp=1"], "chunks=2 with pp=1, which is no pipeline"),
        (["--why-not", "zero1=true,dp=1"], "zero1=True with dp=1"),
        (["--why-not", "microbatches=2,microbatch_size=2"], "Pass microbatches or microbatch_size, not both"),
        (["--why-not", "precision=bf17"], "precision='bf17' is unknown"),
        (["--why-not", "schedule=best"], "schedule='best' is unknown"),
        (["--why-not", "memory=40"], "Cannot read '40' as a memory size"),
        (["--why-not", "tp=2", "--hardware", "a100-nvlink"], "a100-nvlink is cost model a100-nvlink, .* h200"),
        (["--why-not", "tp=2", "--model", "resnet18"], "The plan is for another model: field model.fingerprint"),
        (["--model", "resnet18"], "--model is for --why-not, which is not given"),
        (["--hardware", "a100-nvlink"], "--hardware is for --why-not"),
        (["--diff", "none.json"], "Cannot read plan file none.json"),
    ],
)  # fmt: skip
def test_bad_questions(folder: Path, args: list[str], message: str) -> None:
    code, out, error = invoke("explain", saved(planned(VIT.name, 2)), *args)
    assert (code, out) == (2, ""), error
    assert re.search(message, error), error
    assert "Traceback" not in error


def test_plans_that_cannot_be_planned_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(VIT.name, 2)
    unnamed = saved(replace(plan, model=replace(plan.model, name="VisionTransformer", kwargs={})))
    code, _, error = invoke("explain", unnamed, "--why-not", "tp=2")
    assert code == 2 and re.search("Cannot build the plan's model by its name.* pass --model NAME", error), error
    kwargs = [f"{name}={value}" for name, value in VIT.kwargs.items()]
    code, out, error = invoke("explain", unnamed, "--why-not", "tp=2", "--model", VIT.name, "--model-kwargs", *kwargs)
    assert code == 0 and "why not     tp=2" in out, error
    own = saved(replace(plan, hardware=replace(plan.hardware, name="my-box")))
    code, _, error = invoke("explain", own, "--why-not", "tp=2")
    assert code == 2 and "cost model my-box (field hardware.name), which autopar does not ship" in error, error
    file = Path(autopar.__file__).parents[1] / "cost_models" / "h200-nvlink.toml"
    (folder / "my.toml").write_text(file.read_text().replace('name = "h200-nvlink"', 'name = "my-box"'))
    code, out, error = invoke("explain", own, "--why-not", "tp=2", "--hardware", "my.toml")
    assert code == 0 and "answer" in out, error


def test_a_users_own_model_is_planned_again(folder: Path) -> None:
    (folder / "why_models.py").write_text(USER_MODELS)
    asked = ("--input", "image=4,6", "--input", "Tokens=4x5:int64", "--hardware", "h200-nvlink")
    code, _, error = invoke("plan", "why_models:Mixed", "--devices", "2", "--pp", "2", *asked, "-o", "plan.json")
    assert code == 0, error
    (answer,) = reported("plan.json", "--why-not", "dp=2")["why_not"]
    assert "--input image=4,6 --input Tokens=4,5:int64" in answer["command"], answer


# -- the difference of two ---------------------------------------------------------------------------------------------


def test_what_two_plans_decide_otherwise(folder: Path) -> None:
    one, other = planned(VIT.name, 4, ("pp", 4)), planned(VIT.name, 4, ("pp", 2), ("tp", 2), ("microbatches", 4))
    found = difference(one, other)
    settings = {c.name: (c.before, c.after) for c in found.settings}
    assert settings["mesh"] == ("pp 4 × tp 1 × dp 1", "pp 2 × tp 2 × dp 1")
    assert {"precision", "hardware", "devices", "schedule", "chunks a rank"}.isdisjoint(settings)
    assert [c.name for c in found.cuts][-2:] == ["stage 2 begins with", "stage 3 begins with"]
    assert found.cuts[-1].after == "–" and found.cuts[-1].before == one.stages[3].first
    split = {c.name: c.after for c in found.shardings}
    assert split == {**other.shardings, **other.strategies} and all(c.before == "–" for c in found.shardings)
    assert (found.before.step_seconds, found.after.step_seconds) == pytest.approx(
        (one.prediction.step_seconds, other.prediction.step_seconds)
    )
    code, out, error = invoke("explain", saved(one), "--diff", saved(other, "other.json"))
    assert code == 0, error
    assert re.search(r"mesh +pp 4 × tp 1 × dp 1 +pp 2 × tp 2 × dp 1", out), out


def test_moved_cuts_and_operations_are_named() -> None:
    one = by_hand([(1.0, 2.0)] * 2)
    moved = replace(one.stages[1], first="blocks.0.last.linear")
    other = replace(one, stages=(one.stages[0], moved), exceptions={"side.linear": 1})
    assert [(c.name, c.before, c.after) for c in difference(one, other).cuts] == [
        ("stage 1 begins with", "blocks.1.first.linear", "blocks.0.last.linear"),
        ("side.linear", "in its range", "stage 1"),
    ]
    again = difference(one, one)
    assert (again.settings, again.cuts, again.shardings, again.notes) == ((), (), (), ())


def test_plans_of_other_machines_and_precisions_compare() -> None:
    one = by_hand([(1.0, 2.0)] * 2)
    other = replace(one, hardware=replace(one.hardware, name="other"), precision="bf16",
                    model=replace(one.model, fingerprint="4567"))  # fmt: skip
    found = difference(one, other)
    assert "different machines, box with 10.0 GiB and other with 10.0 GiB" in found.notes[0]
    assert {c.name for c in found.settings} == {"hardware", "precision"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 32}, "different batches: field batch is 64 in the first and 32 in the second"),
        ({"name": "n"}, "different models: field model.name is m in the first and n in the second"),
        ({"kwargs": {"depth": 3}}, r"field model.kwargs is \{\} in the first and \{'depth': 3\}"),
        ({"fingerprint": "9"}, "field model.fingerprint is 0123 in the first and 9"),
        ({"num_params": 8}, "field model.num_params is 7 in the first and 8"),
    ],
)
def test_plans_of_other_models_or_batches_do_not(changes: dict[str, Any], message: str) -> None:
    one = by_hand([(1.0, 2.0)] * 2)
    other = replace(one, **changes) if "batch" in changes else replace(one, model=replace(one.model, **changes))
    with pytest.raises(PlanError, match=message):
        difference(one, other)


# -- the command -------------------------------------------------------------------------------------------------------


def test_what_is_printed(folder: Path) -> None:
    code, out, error = invoke("explain", saved(by_hand([(1.0, 2.0), (1.5, 3.0)], microbatches=2, hop_seconds=0.25)))
    assert code == 0, error
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0].startswith("bound by    compute of stage 1 (blocks.1.first … blocks.1.last), 12.5 %")
    rows = [line.split() for line in lines if re.match(r" +\d", line)]
    assert rows[0] == ["0", "0", "6.0", "0.5", "6.0", "12.5"]
    assert rows[2] == ["1", "1", "9.0", "0.5", "3.0", "12.5"]
    assert rows[4][:7] == ["0", "0", "1.00", "GiB", "10", "%", "9.00"]
    assert "in s and % of the step" in out
    assert "512.0 MiB *" in out


def test_every_part_fits_into_80_columns() -> None:
    plan = planned(VIT.name, 8, ("pp", 2), ("tp", 2), ("dp", 2), ("recompute", "all"), ("microbatches", 2))
    parts = explanation_parts(plan, explained(plan), 80)
    narrow = rendered(parts, 80, color=False)
    assert max(map(len, narrow.splitlines())) <= 80 and not re.search(r"\w…", narrow), narrow
    assert re.search("recom- +collec- +trans- +reduc- +opti-\n", narrow), narrow
    wide = rendered(explanation_parts(plan, explained(plan), 120), 120, color=False)
    assert re.search("compute +recomputation +collectives +transfers +bubble +reduction +optimizer +step", wide), wide


def test_broken_files(folder: Path) -> None:
    Path("cut.json").write_text(by_hand([(1.0, 2.0)]).to_json()[:200])
    for args, message in (
        (["none.json"], "Cannot read plan file none.json"),
        (["cut.json"], "cut.json is not a complete JSON file"),
        ([], "Missing argument 'PLAN.json'"),
    ):
        code, _, error = invoke("explain", *args)
        assert code == 2 and message in error, error


def test_values_are_read_as_flags_are() -> None:
    assert parse_constraints("pp=2, tp=4,zero1=no,memory=40GiB,recompute=none,microbatch-size=3") == {
        "pp": 2, "tp": 4, "zero1": False, "memory": "40GiB", "recompute": "none", "microbatch_size": 3,
    }  # fmt: skip
    with pytest.raises(UsageError, match="is not a whole number"):
        parse_constraints("pp=2.5")
