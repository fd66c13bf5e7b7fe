"""``--json`` of every command: JSON alone on standard output, with the keys that docs/command_line.md promises."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.bench import FLAGS
from support.cli import invoke

from autopar.ir.plan import Plan
from autopar.tools.bench.outcome import BaselineOutcome, RankFailure
from autopar.tools.cli.app import app
from autopar.tools.cli.json_output import prints_json, show_json

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
TINY = ["vit_tiny_patch16_224", "--model-kwargs", "depth=1", "patch_size=8", "--img-size", "32"]
DIGITS = ["--data", "digits", "--train-num-samples", "32", "--val-num-samples", "8", "--devices", "1"]
RUN = ["train", *TINY, *DIGITS, "--batch-size", "32", "--epochs", "1"]


def documented(command: str) -> list[str]:
    """Keys in the row of a command, in order."""
    (row,) = re.findall(rf"^\| `{command}` \| (.*) \|$", PAGE, re.MULTILINE)
    return re.findall(r"`(\w+)`", row)


def documented_items(keys: str, command: str) -> set[str]:
    """Keys of the list that a command prints under one of its keys."""
    (sentence,) = re.findall(rf"`{keys}` of `{command}`[^;.]*", PAGE)
    return {*re.findall(r"`(\w+)`", sentence)} - {keys, command, "null"}


def printed(*args: str, expected: int = 0) -> Any:
    code, out, error = invoke(*args, "--json")
    assert code == expected, error
    return json.loads(out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder of a training run of one update, and the JSON that it printed."""
    folder = tmp_path_factory.mktemp("json") / "run"
    return folder, printed(*RUN, "-o", str(folder))


def test_train(finished: tuple[Path, Any]) -> None:
    folder, value = finished
    assert list(value) == documented("train")
    (weights,) = value["weights"]
    assert set(weights) == documented_items("weights", "train")
    assert weights["accuracy"] == weights["unmodified_accuracy"] and weights["images"] == 8
    assert Path(weights["file"]).exists() and Path(value["history"]).exists()
    again = printed(*RUN, "-o", str(folder), "--resume", "auto")
    assert again["updates"] == 1 and again["weights"][0]["accuracy"] is None


def test_evaluation(finished: tuple[Path, Any]) -> None:
    folder, _ = finished
    evaluated = ["train", *TINY, "--data", "digits", "--val-num-samples", "8", "--devices", "1", "--val-only"]
    value = printed(*evaluated, "--initial-checkpoint", str(folder))
    assert list(value) == documented("train --val-only")
    assert value["samples"] == 8


@pytest.mark.parametrize(
    ("command", "more"),
    [("explain", []), ("simulate", []), ("codegen", ["--rank", "0"]), ("report", ["-o", "page.html"])],
)
def test_commands_that_read_a_plan(
    command: str, more: list[str], finished: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = printed(command, str(finished[0] / "plan.json"), *more)
    assert list(value) == documented(command)


def test_verify_and_export(finished: tuple[Path, Any], tmp_path: Path) -> None:
    value = printed("verify", str(finished[0]))
    assert list(value) == documented("verify") and value["ok"]
    assert {key for one in value["checkpoints"] for key in one} == documented_items("checkpoints", "verify")
    exported = printed("export", str(finished[0]), "-o", str(tmp_path / "model.safetensors"))
    assert list(exported) == documented("export") and exported["updates"] == 1


def test_verify_of_a_damaged_checkpoint_prints_it_and_fails(finished: tuple[Path, Any], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (finished[0] / "last").iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    value = printed("verify", str(copy), expected=2)
    assert not value["ok"] and value["checkpoints"][0]["fault"]


def test_check() -> None:
    value = printed("check", *TINY, "--devices", "1", "--steps", "1", "--batch", "4")
    assert list(value) == documented("check") and value["ok"]
    assert {key for one in value["quantities"] for key in one} == documented_items("quantities", "check")


def test_plan_prints_its_file(tmp_path: Path) -> None:
    flags = ["--devices", "2", "--hardware", "a100-nvlink", "-o", str(tmp_path / "plan.json")]
    code, out, _ = invoke("plan", *TINY, *flags, "--json")
    assert (code, out) == (0, (tmp_path / "plan.json").read_text())
    assert Plan.from_json(out).mesh.devices == 2


def test_bench_prints_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = BaselineOutcome(failure=RankFailure("usage", "too slow"))
    monkeypatch.setattr("autopar.tools.bench.run.run_baseline", lambda *told: failed)
    flags = [*FLAGS, "--batch", "8", "--only", "plain", "-o", str(tmp_path / "r.json")]
    value = printed("bench", *flags, expected=1)
    assert value == json.loads((tmp_path / "r.json").read_text())


def test_no_command_lacks_the_flag() -> None:
    for command in app.registered_commands:
        assert command.callback is not None and command.callback.__name__ in PAGE
        code, out, _ = invoke(command.callback.__name__, "--help")
        assert code == 0 and "--json" in out


def test_all_else_goes_to_standard_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    @prints_json
    def command(as_json: bool) -> None:
        print("a model's own words")
        show_json({"loss": float("nan")})

    for quiet, said in (("", "a model's own words\n"), ("1", "")):
        monkeypatch.setenv("AUTOPAR_QUIET", quiet)
        command(as_json=True)
        shown = capsys.readouterr()
        assert (json.loads(shown.out), shown.err) == ({"loss": None}, said)
