"""``autopar explain --why-not``: the plan under other constraints, or the reason why there is none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import USER_MODELS, invoke
from support.explained_plans import MIXER, RESNET, VIT, planned, reported, saved

import autopar
from autopar.errors import UsageError
from autopar.ir.plan import Plan
from autopar.ir.units import BYTES, text
from autopar.solve.space.constraints import memory_for
from autopar.tools.cli.why_not_args import parse_constraints


@pytest.mark.parametrize(
    ("source", "asked", "given"),
    [
        (VIT, "tp=2", {"tp": 2}),
        (VIT, "pp=2,microbatches=4,recompute=all", {"pp": 2, "microbatches": 4, "recompute": "all"}),
        (VIT, "dp=2,zero=0", {"dp": 2, "zero": 0}),
        (VIT, "precision=bf16", {"precision": "bf16"}),
        pytest.param(RESNET, "pp=2,schedule=gpipe", {"pp": 2, "schedule": "gpipe"}, marks=pytest.mark.full),
        pytest.param(RESNET, "chunks=2", {"chunks": 2}, marks=pytest.mark.full),
        pytest.param(MIXER, "--tp=2", {"tp": 2}, marks=pytest.mark.full),
        pytest.param(MIXER, "microbatch-size=4", {"microbatch_size": 4}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_why_not_finds_what_planning_finds(folder: Path, source: Any, asked: str, given: dict[str, Any]) -> None:
    expected = planned(source.name, 2, *({"schedule": "auto"} | given).items())
    plan = planned(source.name, 2)
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


def test_why_not_keeps_the_dtype_in_which_gradients_travel(folder: Path) -> None:
    narrow, wide = (planned(VIT.name, 2, ("dp", 2), ("reduce_dtype", d)) for d in ("bfloat16", "float32"))
    (answer,) = reported(saved(narrow), "--why-not", "dp=2")["why_not"]
    assert answer["plan"]["reduce_dtype"] == "bfloat16"
    assert "that is the plan in the file" in answer["text"]
    (answer,) = reported(saved(wide), "--why-not", "dp=2,reduce-dtype=bfloat16")["why_not"]
    assert Plan.from_json(json.dumps(answer["plan"])).decision == narrow.decision != wide.decision


def test_why_not_plans_for_averages_of_weights(folder: Path) -> None:
    arguments = [f"{name}={value}" for name, value in VIT.kwargs.items()]
    flags = "--batch", "16", "--devices", "2", "--dp", "2", "--zero", "0", "--hardware", "h200-nvlink", "--model-kwargs"
    code, _, error = invoke("plan", VIT.name, "--model-ema", "-o", "averaged.json", *flags, *arguments)
    assert code == 0, error
    averaged, plain = Plan.load("averaged.json"), planned(VIT.name, 2, ("dp", 2), ("zero", 0))
    grown = max(averaged.prediction.peak_bytes) - max(plain.prediction.peak_bytes)
    assert grown == 4 * averaged.model.num_params
    (answer,) = reported("averaged.json", "--why-not", "dp=2,zero=0", "--model-ema")["why_not"]
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
    source = replace(VIT, kwargs={**VIT.kwargs, "num_classes": 3, "embed_dim": 1, "num_heads": 1, "patch_size": 32})
    plan = autopar.plan(source, 5, hardware="h200-nvlink", batch_size=20)
    (answer,) = reported(saved(plan), "--why-not", "tp=5")["why_not"]
    assert "tp=5: nothing in vit_tiny_patch16_224 can be split 5 ways" in answer["text"]


def test_a_limit_that_the_plan_was_made_with_stays(folder: Path) -> None:
    question = {"recompute": "none", "microbatches": 1, "dp": 2, "zero": 0}
    limit = memory_for(max(planned(VIT.name, 2, *question.items()).prediction.peak_bytes)) - 1
    plan = planned(VIT.name, 2, ("memory", limit))
    asked = "recompute=none,microbatches=1,dp=2,zero=0"
    (answer,) = reported(saved(plan), "--why-not", asked)["why_not"]
    assert "No plan fits" in answer["text"] and f"(97 % of {text(limit, BYTES)})" in answer["text"], answer["text"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--why-not", "pt=2"], r"--why-not pt=2: unknown constraint 'pt'. Did you mean tp\? Known: memory, cost, "),
        (["--why-not", "hardware=x"], "unknown constraint 'hardware'"),
        (["--why-not", "tp"], "Cannot read --why-not 'tp'. Write NAME=VALUE"),
        (["--why-not", "tp="], "Cannot read --why-not 'tp='"),
        (["--why-not", "tp=two"], "--tp two is no tensor-parallel size. Write the ranks, or"),
        (["--why-not", "zero=perhaps"], "zero='perhaps' is not a whole number"),
        (["--why-not", "zero1=true"], "unknown constraint 'zero1'. Did you mean zero?"),
        (["--why-not", "tp=0"], "tp=0 must be a whole number of at least 1"),
        (["--why-not", "tp=2,tp=4"], "--why-not tp=2,tp=4 gives tp two values, 2 and 4"),
        (["--why-not", "chunks=2,schedule=gpipe"], "chunks=2 with schedule='gpipe', under which each rank has 1"),
        (["--why-not", "chunks=2,pp=1"], "chunks=2 with pp=1, which is no pipeline"),
        (["--why-not", "zero=1,dp=1"], "zero=1 with dp=1"),
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
    code, _, error = invoke("plan", "why_models:Mixed", "--devices", "2", "--dp", "2", *asked, "-o", "plan.json")
    assert code == 0, error
    (answer,) = reported("plan.json", "--why-not", "pp=2", "--model", "why_models:Mixed")["why_not"]
    assert "--input image=4,6 --input Tokens=4,5:int64" in answer["command"], answer


def test_values_are_read_as_flags_are() -> None:
    assert parse_constraints("pp=2, tp=4,zero=0,memory=40GiB,recompute=none,microbatch-size=3") == {
        "pp": 2, "tp": 4, "zero": 0, "memory": "40GiB", "recompute": "none", "microbatch_size": 3,
    }  # fmt: skip
    with pytest.raises(UsageError, match="is not a whole number"):
        parse_constraints("pp=2.5")
