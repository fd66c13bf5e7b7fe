"""The command line as a user meets it: output, messages, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.core
import typer.main
from support.cli import USER_MODELS, invoke
from typer.testing import CliRunner

import autopar
from autopar.errors import UsageError
from autopar.tools.cli.app import app
from autopar.tools.cli.command import spread
from autopar.tools.cli.flags import parse_kwargs, parse_pins, parse_shape
from autopar.tools.cli.output import check_writable

TINY = ["vit_tiny_patch16_224", "--model-kwargs", "depth=2", "patch_size=8", "num_classes=10", "--img-size", "32"]


@pytest.fixture(scope="module")
def tiny_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file of a small ViT on two devices."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    asked = ["--devices", "2", "--pp", "2", "--schedule", "1f1b", "--batch", "8", "--hardware", "cpu-generic", "-o"]
    code, _, error = invoke("plan", *TINY, *asked, str(path))
    assert code == 0, error
    return path


@pytest.fixture
def user_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the user's own models, current."""
    (tmp_path / "own_models.py").write_text(USER_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    return tmp_path


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_prints_and_saves(tiny_plan):
    plan = autopar.Plan.load(tiny_plan)
    assert plan.model.kwargs == {"depth": 2, "patch_size": 8, "num_classes": 10, "img_size": 32}
    assert [i.shape for i in plan.model.inputs] == [(8, 3, 32, 32)]
    assert plan.mesh.pp == 2 and plan.batch == 8


def test_json_is_alone_on_stdout():
    code, out, _ = invoke("plan", *TINY, "--devices", "1", "--batch", "4", "--hardware", "a100-nvlink", "--json")
    assert code == 0
    assert autopar.Plan.from_json(out).hardware.name == "a100-nvlink"


def test_flags_reach_the_plan(user_models):
    code, out, _ = invoke(
        "plan", "own_models:linear", "--input", "6x4", "--devices", "2", "--hardware", "cpu-generic", "--json",
        "--microbatches", "3", "--schedule", "gpipe", "--balance", "uniform", "--memory", "2GiB", "--pin", "2=1",
        "--pp", "2", "--tp", "1",
    )  # fmt: skip
    plan = autopar.Plan.from_json(out)
    assert code == 0
    assert (plan.batch, plan.microbatches, plan.schedule, plan.solver.balance) == (6, 3, "gpipe", "uniform")
    assert plan.stages[1].first in ("1.relu", "2.linear")


def test_model_and_images_are_in_channels_last_where_a_flag_says_so(user_models):
    model = ["own_models:ChannelsLast", "--input", "8,3,6,6", "--devices", "2"]
    planned = ["plan", *model, "--hardware", "cpu-generic", "-o", "plan.json"]
    asked = ["explain", "plan.json", "--why-not", "pp=1", "--model", "own_models:ChannelsLast"]
    checked = ["check", *model, "--steps", "1"]
    for command in (planned, asked, checked):
        code, _, error = invoke(*command, "--channels-last")
        assert code == 0, error
        code, _, error = invoke(*command)
        assert code != 0 and "strides (108, 36, 6, 1)" in error
    data = ["--data", "digits", "--train-num-samples", "32", "--val-num-samples", "16", "--batch-size", "16"]
    trained = ["train", "own_models:ChannelsLast", *data, "--devices", "1", "--epochs", "1", "--backend", "gloo"]
    code, _, error = invoke(*trained, "-o", "run", "--channels-last")
    assert code == 0, error
    code, _, error = invoke(*trained, "-o", "other")
    assert code != 0 and "strides (3072, 1024, 32, 1)" in error


@pytest.mark.filterwarnings("default::autopar.MicrobatchWarning")
def test_changed_microbatches_are_one_line_on_stderr(user_models):
    asked = ("own_models:linear", "--input", "8x4", "--devices", "2", "--hardware", "cpu-generic", "--dp", "1")
    result = CliRunner().invoke(app, ["plan", *asked, "--microbatches", "5"], prog_name="autopar")
    assert result.exit_code == 0, result.stderr
    assert "8 in 4 microbatches of 2" in result.stdout
    assert re.fullmatch(r"warning: microbatches=5 becomes 4 microbatches of 2: .* asked for\.\n", result.stderr)
    assert invoke("plan", *asked, "--microbatches", "4", "--json")[2] == ""


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["vit_tyny_patch16_224"], 2, "no model named 'vit_tyny_patch16_224'.* Did you mean vit_tiny_patch16_224"),
        (["torchvision:resnet51"], 2, "no model named 'resnet51'.* Did you mean resnet50"),
        (["nowhere:model"], 2, "Cannot import 'nowhere'"),
        ([*TINY, "--hardware", "h20-nvlink"], 2, "No cost model is named 'h20-nvlink'.*h200-nvlink"),
        ([*TINY, "--hardware", "missing.toml"], 2, "Cannot read cost model missing.toml"),
        ([*TINY, "--memory", "lots"], 2, "Cannot read 'lots' as a memory size"),
        ([*TINY, "--memory", "24Giga"], 2, "Cannot read '24Giga' as a memory size"),
        ([*TINY, "--pin", "blocks.1"], 2, "Cannot read --pin 'blocks.1'. Write NAME=STAGE"),
        ([*TINY, "--pin", "=1"], 2, "Cannot read --pin '=1'"),
        ([*TINY, "--pin", "blocks.1=0", "--pin", "blocks.1=1"], 2, "gives blocks.1 two stages, 0 and 1"),
        ([*TINY, "--pp", "2", "--pin", "blocks.7=1"], 2, "Cannot pin 'blocks.7'"),
        ([*TINY, "--pp", "2", "--pin", "blocks.1=5"], 2, "blocks.1 is pinned to stage 5, stages are 0 to 1"),
        ([*TINY, "--batch", "4", "--microbatches", "8"], 2, "microbatches=8 of a batch of 4"),
        ([*TINY, "--schedule", "1f1b", "--chunks", "2"], 2, "chunks=2 with schedule='1f1b', under which each rank"),
        ([*TINY, "--tp", "2", "--pp", "2"], 2, "pp=2 × tp=2 make 4 devices, not 2. Use devices=4 or pp=1 or tp=1"),
        ([*TINY, "--dp", "2", "--batch", "5"], 2, "dp=2: 2 replicas cannot share a batch of 5 samples evenly"),
        ([*TINY, "--dp", "2", "--batch", "8", "--microbatches", "8"], 2, "each of 2 replicas has 4 samples"),
        ([*TINY, "--zero", "1", "--dp", "1"], 2, "zero=1 with dp=1: there are no replicas"),
        ([*TINY, "--tp", "797", "--devices", "797", "--hardware", "h200-nvlink"], 2,
         "tp=797: nothing in .* can be split 797 ways: .*3 heads.* Use tp=1"),
        ([*TINY, "--tp", "4", "--devices", "16", "--hardware", "h200-nvlink", "--dp", "3"], 2, "dp=3"),
        ([*TINY, "--tp", "2x0", "--devices", "4"], 2, r"tp=\(2, 0\) must be .* of at least 2 ranks, such as \(2, 2\)"),
        ([*TINY, "--tp", "two"], 2, "--tp two is no tensor-parallel size. Write the ranks, or those of several axes"),
        ([*TINY, "--tp", "2x2", "--devices", "6"], 2, "tp=4 needs a multiple of 4 devices, not 6. Use devices=4 or"),
        ([*TINY, "--schedule", "zigzag"], 2, "schedule='zigzag' is unknown"),
        (["m", "--input", "8,3", "--input", "a=8,3"], 2, r"--input is given with names \(a\) and without"),
        (["m", "--input", "a=8,3", "--input", "a=8,3"], 2, "--input a is given 2 times. Give each input once"),
        (["m", "--input", "1a=8,3"], 2, "Cannot read --input '1a=8,3': '1a' is not an argument's name"),
        (["m", "--input", "a=8,3:float"], 2, "Cannot read --input 'a=8,3:float': 'float' is not a dtype. .* int64"),
        (["vit_tiny_patch16_224", "--input", "8,3,a,b"], 2, "Cannot read --input '8,3,a,b' as a shape"),
        ([*TINY, "--input", "8,3,32,32"], 2, "Both --input and --img-size are given"),
        ([*TINY, "--model-kwargs", "img_size=64"], 2, "--img-size 32 and --model-kwargs img_size=64 disagree"),
        ([*TINY, "--model-kwargs", "dept=3"], 2, r"vit_tiny_patch16_224\(.*failed: TypeError"),
        ([*TINY, "--model-kwargs", "7=3"], 2, "Cannot read --model-kwargs '7=3'"),
        ([*TINY, "--batch", "4096", "--memory", "1MiB"], 3, "No plan fits: stage"),
        ([*TINY, "-o", "no/such/folder/plan.json"], 2, "Cannot write to no/such/folder/plan.json: No such file"),
        ([*TINY, "-o", "."], 2, r"Cannot write to \.: Is a directory. Give a file"),
        ([*TINY, "--bogus"], 2, "No such option: --bogus"),
        ([*TINY, "--devices", "0"], 2, "devices"),
    ],
)  # fmt: skip
def test_bad_arguments_of_plan(args, code, message):
    given = args if "--devices" in args else [*args, "--devices", "2"]
    given = given if "--hardware" in args else [*given, "--hardware", "cpu-generic"]
    got, out, error = invoke("plan", *given)
    assert (got, out) == (code, "")
    assert re.search(message, error), error
    assert "Traceback" not in error


def test_a_plan_that_cannot_be_saved_is_not_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("autopar.plan", lambda *_, **__: pytest.fail("searched for a plan"))
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "missing" / "plan.json")
    for path, message in ((tmp_path, "Is a directory"), (link, "No such file or directory")):
        code, _, error = invoke("plan", *TINY, "--devices", "2", "-o", str(path))
        assert (code, message in error) == (2, True), error
    assert link.is_symlink()


def test_trying_whether_a_file_can_be_written_leaves_nothing_new(tmp_path):
    old, link = tmp_path / "old", tmp_path / "link"
    old.write_text("kept")
    link.symlink_to(tmp_path / "new")
    for path in (old, link, tmp_path / "other"):
        check_writable(path)
    assert (old.read_text(), link.is_symlink(), len(list(tmp_path.iterdir()))) == ("kept", True, 2)


def test_more_stages_than_pieces_is_infeasible(user_models):
    code, _, error = invoke(
        "plan", "own_models:linear", "--input", "4,4", "--devices", "6", "--pp", "6", "--hardware", "cpu-generic"
    )
    assert code == 3
    assert re.search(r"No plan has 6 stages: own_models:linear can be cut into \d pieces at most", error)


def test_an_untraceable_model_is_named_with_file_and_line(user_models):
    code, _, error = invoke("plan", "own_models:Branching", "--input", "4,4", "--devices", "2")
    assert code == 4
    assert re.search(r"Cannot trace Branching in train mode at .*own_models\.py:11, in forward", error), error
    code, _, debugged = invoke("plan", "own_models:Branching", "--input", "4,4", "--devices", "2", "--debug")
    assert code == 4 and "in _export" in debugged and "in _export" not in error  # torch's frames


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_models:linaer", "own_models has no model named 'linaer'.* Did you mean linear"),
        ("own_models:no_model", "own_models:no_model returned an int; it must return a torch.nn.Module"),
        ("own_models:linear", "Cannot derive the inputs of Sequential.*--input"),
    ],
)
def test_user_factories_that_cannot_be_planned(user_models, name, message):
    code, _, error = invoke("plan", name, "--devices", "2")
    assert code == 2
    assert re.search(message, error), error


def test_mesh_flags_reach_the_plan():
    code, out, error = invoke(
        "plan", *TINY, "--devices", "4", "--batch", "16", "--dp", "2", "--tp", "2", "--zero", "1",
        "--microbatches", "2", "--reduce-dtype", "bfloat16", "--hardware", "a100-nvlink", "--json",
    )  # fmt: skip
    assert code == 0, error
    plan = autopar.Plan.from_json(out)
    assert (str(plan.mesh), plan.zero, plan.microbatches) == ("pp 1 × tp 2 × dp 2", 1, 2)
    assert plan.reduce_dtype == "bfloat16"
    assert plan.strategies and plan.blocks
    assert plan.stages[0].ranks == (0, 1, 2, 3) and plan.solver.method == "shardings"


# -- codegen -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_codegen_prints_one_rank(tiny_plan, mode):
    code, out, _ = invoke("codegen", str(tiny_plan), "--rank", "1", "--mode", mode)
    assert code == 0
    assert out.startswith(f"# rank 1 (stage 1) of pp 2 × tp 1 × dp 1\n# stage 1, {mode}, microbatch of ")
    assert "# from stage 0: " in out
    compile(out, "rank 1", "exec")


def test_codegen_prints_every_chunk_of_a_rank(tmp_path):
    path = tmp_path / "plan.json"
    flags = [
        "--devices", "2", "--batch", "8", "--img-size", "32", "--microbatches", "2", "--model-kwargs", "depth=4",
        "patch_size=8", "embed_dim=32", "num_heads=2", "--hardware", "cpu-generic", "--pp", "2", "--schedule",
        "interleaved", "--chunks", "2",
    ]  # fmt: skip
    assert invoke("plan", "vit_tiny_patch16_224", *flags, "-o", str(path))[0] == 0
    code, out, _ = invoke("codegen", str(path), "--rank", "1")
    assert code == 0 and out.startswith("# rank 1 (stages 1 and 3) of pp 2 × tp 1 × dp 1\n# stage 1, train")
    assert out.count("\n# stage 3, train, microbatch of 4") == 1 and "# to stage 2: " in out
    compile(out, "rank 1", "exec")


def broken(plan: Path, folder: Path, **changes: object) -> Path:
    """A copy of a plan file with fields replaced; a name such as ``model__name`` reaches inside."""
    data = json.loads(plan.read_text())
    for path, value in changes.items():
        *outer, last = path.split("__")
        inside = data
        for name in outer:
            inside = inside[name]
        inside[last] = value
    (folder / "broken.json").write_text(json.dumps(data))
    return folder / "broken.json"


@pytest.mark.parametrize("flag", ["--zero1", "--no-zero1"])
def test_the_flag_that_zero_replaces_names_it(flag: str):
    code, _, error = invoke("plan", *TINY, "--devices", "2", flag)
    assert (code, "--zero)" in error) == (2, True), error


def test_bad_plan_files(tiny_plan, tmp_path):
    (tmp_path / "cut.json").write_text(tiny_plan.read_text()[:300])
    stages = json.loads(tiny_plan.read_text())["stages"]
    for path, message in (
        (tmp_path / "none.json", "Cannot read plan file .*none.json"),
        (tmp_path / "cut.json", "cut.json is not a complete JSON file: .* line "),
        (broken(tiny_plan, tmp_path, schema_version=99), "field schema_version is 99, this autopar reads 4"),
    ):
        code, _, error = invoke("codegen", str(path), "--rank", "0")
        assert code == 2
        assert re.search(message, error), error
    for changes, message in (
        ({"stages": stages[:1]}, "field stages: has 1 entries, mesh.pp × chunks asks for 2"),
        ({"batch": "many"}, "Field batch: "),
        (
            {"model__kwargs": {"depth": 3, "patch_size": 8, "img_size": 32}},
            "The plan is for another model: field model.",
        ),
        ({"model__name": "VisionTransformer"}, "Cannot build the plan's model by its name.* pass --model NAME"),
    ):
        code, _, error = invoke("codegen", str(broken(tiny_plan, tmp_path, **changes)), "--rank", "0")
        assert code == 2
        assert re.search(message, error), error


def test_codegen_of_a_plan_made_in_python(tiny_plan, tmp_path):
    unnamed = broken(tiny_plan, tmp_path, model__name="VisionTransformer", model__kwargs={})
    code, out, error = invoke("codegen", str(unnamed), "--rank", "0", "--model", *TINY[:-2], "img_size=32")
    assert code == 0, error
    assert out.startswith("# rank 0 (stage 0) of pp 2 × tp 1 × dp 1\n# stage 0, train")


def test_codegen_says_what_a_rank_holds(tmp_path):
    file = tmp_path / "plan.json"
    code, out, error = invoke(
        "plan",
        *TINY,
        "--devices",
        "4",
        "--batch",
        "16",
        "--pp",
        "1",
        "--tp",
        "2",
        "--hardware",
        "a100-nvlink",
        "--json",
    )
    assert code == 0, error
    changes = {
        "strategies": {"blocks.*.mlp.fc1.linear": "n", "blocks.*.mlp.act.gelu": "d2", "blocks.*.mlp.fc2.linear": "k"},
        "shardings": {"blocks.*.mlp.fc1.weight": "tp:0", "blocks.*.mlp.fc2.weight": "tp:1", "norm.bias": "tp:gradient"},
    }
    file.write_text(json.dumps(json.loads(out) | changes))
    code, out, error = invoke("codegen", str(file), "--rank", "3")
    assert code == 0, error
    lines = out.splitlines()
    assert lines[0] == "# rank 3 (replica 1, shard 1) of pp 1 × tp 2 × dp 2"
    assert "# holds   blocks.1.mlp.fc2.weight: float32[192, 384] of [192, 768], tp:1" in lines
    assert "# holds   norm.bias: whole, its gradient is summed over tp once a step" in lines
    assert sum("torch.ops.autopar.all_reduce.default(blocks_" in line for line in lines) == 2  # one a block


def test_codegen_knows_its_ranks(tiny_plan):
    code, _, error = invoke("codegen", str(tiny_plan), "--rank", "2")
    assert (code, error) == (2, "error: --rank 2: the plan has ranks 0 to 1. ")


# -- simulate ----------------------------------------------------------------------------------------------------------


def test_simulate_prints_and_writes(tiny_plan, tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "step.png"
    code, out, error = invoke("simulate", str(tiny_plan), "--trace", str(trace), "--png", str(picture))
    assert code == 0, error
    plan = autopar.Plan.load(tiny_plan)
    assert f"{plan.prediction.samples_per_second:,.1f} samples/s" in out
    assert re.search(r"^ +1 +1 +\d+ % ", out, re.MULTILINE) and out.endswith(f"\nsaved to {trace} and {picture}\n")
    assert len([e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_simulate_compares_another_schedule_with_the_plans(tiny_plan):
    code, out, error = invoke("simulate", str(tiny_plan), "--schedule", "gpipe")
    assert code == 0, error
    assert re.search(r"^gpipe  .*\n1f1b \(the plan\) .* –$", out, re.MULTILINE)


def test_simulate_as_json_is_alone_on_stdout(tiny_plan):
    plan = autopar.Plan.load(tiny_plan)
    for schedule in ((), ("--schedule", "gpipe")):
        code, out, error = invoke("simulate", str(tiny_plan), "--json", *schedule)
        assert (code, error) == (0, "")
        found = json.loads(out)
        assert found["plan_step_seconds"] == pytest.approx(plan.prediction.step_seconds)
        assert [p["stages"] for p in found["positions"]] == [[0], [1]]
        assert (found["schedule"], found["plan_schedule"]) == (schedule[1] if schedule else "1f1b", "1f1b")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--schedule", "zigzag"], "No schedule is named 'zigzag'"),
        (
            ["--schedule", "interleaved"],
            "has 1 chunk a rank, .* or zb-h1. Plan for it: autopar plan vit_tiny",
        ),
        (["--trace", "one", "--png", "./one"], "--trace and --png both write to one. Give each a file of its own"),
        (["--trace", "missing/trace.json"], "Cannot write to missing/trace.json: No such file"),
        (["--png", "."], r"Cannot write to \.: Is a directory"),
        (["--png", "plan.json"], "--png plan.json would write over the plan"),
    ],
)
def test_bad_arguments_of_simulate(tiny_plan, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_bytes(tiny_plan.read_bytes())
    code, out, error = invoke("simulate", "plan.json", *args)
    assert (code, out) == (2, "")
    assert re.search(message, error), error
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_simulate_of_what_is_no_plan(tiny_plan, tmp_path):
    (tmp_path / "list.json").write_text("[]")
    for path, message in (
        (tmp_path / "none.json", "Cannot read plan file .*none.json"),
        (tmp_path / "list.json", "list.json is JSON but not a plan"),
        (broken(tiny_plan, tmp_path, schema_version=3), "field schema_version is 3, this autopar reads 4"),
    ):
        code, out, error = invoke("simulate", str(path))
        assert (code, out) == (2, "")
        assert re.search(message, error), error


def test_a_picture_needs_matplotlib(tiny_plan, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, error = invoke("simulate", str(tiny_plan), "--png", str(tmp_path / "step.png"))
    assert (code, out) == (2, "") and "--png needs matplotlib: pip install 'autopar[bench]'" in error


@pytest.mark.parametrize(("name", "flags"), [("simulate", []), ("explain", ["--why-not", "tp=3"])])
def test_simulate_and_refused_questions_need_no_torch(name: str, flags: list[str], tiny_plan):
    script = "import sys; from autopar.tools.cli.app import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(autopar.__file__).parents[1])}
    command = [sys.executable, "-c", script, name, str(tiny_plan), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False"), done.stderr


# -- check -------------------------------------------------------------------------------------------------------------


def test_check_of_a_users_model_with_noise_compares_evaluation_only(user_models):
    code, out, error = invoke(
        "check", "own_models:Noisy", "--input", "4,4", "--devices", "2", "--microbatches", "2", "--steps", "1"
    )
    assert code == 0, error
    assert "not compared: training. Random operations remain" in out and "rand_like" in out
    assert "Evaluation, the only thing compared, is equal" in out
    assert "gradients" not in out


@pytest.mark.filterwarnings("always::autopar.errors.FrozenNumberWarning")
def test_check_fails_where_the_numbers_differ(user_models):
    code, out, error = invoke(
        "check", "own_models:Drifting", "--input", "4,4", "--devices", "2", "--microbatches", "2", "--steps", "1"
    )
    assert code == 1, error
    assert "warning: The forward of Drifting changes calls (from " in error
    assert re.search(r"outputs, train mode +1 .* FAILED +output 0, step 1", out), error
    assert "FAILED: outputs, train mode, loss, gradients" in out


MIXED = ["own_models:Mixed", "--input", "image=4,6", "--input", "Tokens=4x5:int64", "--devices", "2"]


def test_several_inputs_are_planned_checked_and_printed(user_models):
    asked = "--batch", "6", "--dp", "2", "--hardware", "cpu-generic"
    code, _, error = invoke("plan", *MIXED, *asked, "-o", "plan.json")
    assert code == 0, error
    inputs = autopar.Plan.load("plan.json").model.inputs
    assert [(i.name, i.shape, i.dtype) for i in inputs] == [("image", (6, 6), "float32"), ("tokens", (6, 5), "int64")]
    code, out, error = invoke("codegen", "plan.json", "--rank", "0", "--model", "own_models:Mixed")
    assert code == 0 and "# input   image: float32[" in out, error
    code, out, error = invoke("check", *MIXED, "--pp", "2", "--steps", "1")
    assert code == 0 and "4 in 2 microbatches of 2" in out and "Everything is equal" in out, out + error
    assert "mesh        pp 2 × tp 1 × dp 1\n" in out.replace(" \n", "\n"), out


def test_inputs_by_position_are_planned_but_cannot_be_rebuilt(user_models):
    shapes = ["--input", "4,4", "--input", "4,4"]
    code, _, error = invoke("plan", "own_models:Several", *shapes, "--devices", "2", "-o", "plan.json")
    assert code == 0, error
    code, _, error = invoke("codegen", "plan.json", "--rank", "0", "--model", "own_models:Several")
    assert code == 2
    assert re.search(
        r"Cannot call Several\.forward\(\*xs\) with .* field model\.inputs: xs_0, xs_1\. .*\*args", error
    ), error


def test_inputs_of_different_first_sizes_are_named_only_where_they_fail(user_models):
    devices = ("--devices", "2", "--hardware", "cpu-generic")
    code, _, error = invoke("plan", "own_models:Added", "--input", "image=8,6", "--input", "words=3,5", *devices)
    assert code == 4
    likely = (
        r"The likely cause: the inputs begin with different sizes \(image \[8, 6\], words \[3, 5\]\)\. .* batch, 8,"
    )
    assert re.search(likely, error) and "branch on tensor values" not in error, error
    code, _, error = invoke("plan", "own_models:Added", "--input", "image=8,6", "--input", "words=1,5", *devices)
    assert code == 0, error


def test_inputs_that_forward_does_not_take(user_models):
    code, _, error = invoke("plan", "own_models:Mixed", "--input", "picture=4,6", "--devices", "2")
    assert code == 2 and "do not fit Mixed.forward" in error
    code, _, error = invoke("bench", *MIXED)
    assert code == 2 and "bench feeds a model random images" in error


# -- all together ------------------------------------------------------------------------------------------------------


def test_help_names_the_commands():
    code, out, _ = invoke("--help")
    assert code == 0
    assert all(
        name in out for name in ("plan", "explain", "simulate", "check", "train", "codegen", "bench", "Exit codes")
    )


def test_help_in_80_columns_names_every_flag_and_command_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = invoke("bench", "--help")
    flags = set(re.findall(r"--[a-z0-9-]+", out))
    assert code == 0 and {"--microbatch-size", "--microbatch-sizes", "--batch-size", "--no-cuda-graph"} <= flags
    assert max(map(len, out.splitlines())) <= 80
    _, out, _ = invoke("--help")
    assert "Prove on this machine that MODEL computes the same on N devices as on one." in " ".join(out.split())


def test_version():
    assert invoke("--version") == (0, f"autopar {autopar.__version__}\n", "")


def test_debug_shows_the_traceback_wherever_it_stands():
    for args in (["--debug", "plan", "nothing", "--devices", "2"], ["plan", "nothing", "--devices", "2", "--debug"]):
        code, _, error = invoke(*args)
        assert code == 2
        assert "Traceback" in error and "error: timm has no model named 'nothing'" in error


def test_names_of_options_are_in_lower_case():
    """typer 0.27 makes ``--NAME`` of an option that does not say its name and has a metavar NAME."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    commands = [group, *group.commands.values()]
    names = [
        name for command in commands for option in command.params for name in (*option.opts, *option.secondary_opts)
    ]
    assert len(commands) == 13 and {"--name", "--devices", "-o"} <= set(names)
    assert [name for name in names if name != name.lower()] == []


def test_help_imports_no_torch():
    """And so it is quick; and the exit code of a real process is the one promised."""
    script = "import sys; from autopar.tools.cli.app import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(autopar.__file__).parents[1])}
    for args, code in ((["--help"], 0), (["--version"], 0), (["plan", "x"], 2), (["nothing"], 2)):
        done = subprocess.run([sys.executable, "-c", script, *args], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (code, "False"), done.stderr


def test_flag_texts():
    assert parse_shape("8, 3,64,64") == parse_shape("8x3x64x64") == (8, 3, 64, 64)
    assert parse_kwargs(["a=1", "b=avg", "c=(1, 2)", "d=None", "e=x=y"]) == {
        "a": 1, "b": "avg", "c": (1, 2), "d": None, "e": "x=y",
    }  # fmt: skip
    assert parse_pins(["a.b=1", "c=0"]) == {"a.b": 1, "c": 0}
    with pytest.raises(UsageError, match="a plan file cannot hold this value"):
        parse_kwargs(["a=1j"])
    args = ["m", "--model-kwargs", "a=1", "b=2", "--devices", "2", "--model-kwargs", "c=3", "x=y", "plain", "d=4"]
    assert spread(args) == [
        "m", "--model-kwargs", "a=1", "--model-kwargs", "b=2", "--devices", "2",
        "--model-kwargs", "c=3", "--model-kwargs", "x=y", "plain", "d=4",
    ]  # fmt: skip
