"""The command `autopar bench` without processes: Ctrl-C between baselines, and bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.bench import FLAGS, request
from support.cli import invoke

from autopar.errors import UsageError
from autopar.ir.plan import Plan
from autopar.tools.bench.baselines.registry import BASELINES
from autopar.tools.bench.outcome import BaselineOutcome, RankFailure
from autopar.tools.bench.request import BenchRequest
from autopar.tools.bench.run import BenchInterrupted, BenchOutput, run_bench
from autopar.tools.bench.task import BenchTask


@pytest.mark.parametrize(
    ("flags", "number", "said"),
    [
        (["-o", "r.json"], 1, "Interrupted after 1 of 3 baselines; rows so far in r.json."),
        (
            ["-o", "r.json", "--png", "r.png", "--only", "autopar", "--trace", "t.json"],
            1,
            "Interrupted after 1 of 4 baselines; rows so far in r.json, r.png.",
        ),
        ([], 1, "Interrupted after 1 of 3 baselines; nothing was written."),
        (["-o", "r.json"], 0, "Interrupted after 0 of 3 baselines; nothing was written."),
    ],
)
def test_ctrl_c_keeps_the_rows_so_far(
    flags: list[str], number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = iter([BaselineOutcome(failure=RankFailure("usage", "too slow"))] * number)

    def run(*told: object) -> BaselineOutcome:
        for outcome in outcomes:
            return outcome
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autopar.tools.bench.run.run_baseline", run)
    code, out, error = invoke("bench", *FLAGS, "--batch", "8", "--only", "plain,single,ddp", *flags)
    assert code == 130 and error.strip().endswith(said)
    assert ("too slow" in out) == (number > 0)
    if flags and number:
        assert [row["contestant"] for row in json.loads(Path("r.json").read_text())["rows"]] == ["plain"]
        assert Path("r.png").exists() == ("r.png" in flags) and not Path("t.json").exists()
    else:
        assert not list(tmp_path.iterdir())


def test_ctrl_c_keeps_the_first_variants_of_a_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(told: BenchTask, *others: object) -> BaselineOutcome:
        if told.settings["reshard"]:
            raise KeyboardInterrupt
        return BaselineOutcome(failure=RankFailure("usage", "too slow"))

    monkeypatch.setattr("autopar.tools.bench.run.run_baseline", run)
    with pytest.raises(BenchInterrupted, match="after 0 of 1 baseline") as caught:
        run_bench(request(only=("fsdp2",), microbatch_sizes=()))
    (row,) = caught.value.output.result.rows
    assert row.reason == "too slow" and row.best


def test_ctrl_c_while_planning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def planning(*given: object, **constraints: object) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.tools.bench.run.plan", planning)
    code, out, error = invoke("bench", *FLAGS, "--batch", "8")
    assert (code, out) == (130, "") and error.strip().endswith("before the first baseline; nothing was written.")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "fdsp2"], r"--only fdsp2: there is no such baseline. Did you mean fsdp2\? Known: plain, single"),
        (["--skip", "ddp,megatron"], "--skip megatron: there is no such baseline. Known: plain"),
        (
            ["--only", "plain:fast"],
            r"--only plain:fast: there is no such variant. --only takes plain:blocks, plain:who",
        ),
        (["--skip", "plain:whole"], r"--skip plain:whole: there is no such variant. --only takes plain:blocks, plain:"),
        (["--only", "ddp", "--skip", "ddp"], "--only ddp --skip ddp leaves nothing to measure"),
        (["--skip", ",".join(BASELINES)], "error: --skip plain,single.* leaves nothing to measure"),
        (["--only", ""], "--only '' names no baseline. Write names such as ddp,fsdp2"),
        (["--skip", ","], "--skip ',' names no baseline"),
        (["--only", "ddp", "--microbatch-sizes", "4"], "--microbatch-sizes is for 1f1b or interleaved, and neither"),
        (["-o", "a.json", "--png", "./a.json"], "-o and --png both write to a.json. Give each a file of its own"),
        (["--png", "a", "--trace", "a"], "--png and --trace both write to a"),
        (["--microbatch-sizes", "16,two"], "Cannot read --microbatch-sizes '16,two'"),
        (["--microbatch-sizes", "64"], "--microbatch-sizes 64: a microbatch has from 1 to 8 samples"),
        (["--only", "ddp", "--trace", "t.json"], "--trace shows a step of the plan: let autopar take part"),
        (["-o", "no/such/folder/r.json"], "Cannot write to no/such/folder/r.json: No such file or directory"),
        (["--png", "."], r"Cannot write to \.: Is a directory"),
        (["--steps", "0"], r"--steps.*\b1\.?$"),
        (["--microbatches", "99"], "microbatch"),
    ],
)
def test_bad_input_ends_before_anything_runs(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autopar.tools.bench.run.run_baseline", None)  # nothing is started
    code, out, error = invoke("bench", *FLAGS, "--batch", "8", *flags)
    assert code in (2, 3) and out == "", error
    assert re.search(message, " ".join(re.sub("[│╭╮╰╯─]", " ", error).split())), error
    assert not list(tmp_path.iterdir())


def test_a_single_step_is_enough_and_the_memory_format_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BenchRequest] = []

    def note(told: BenchRequest, *others: object) -> BenchOutput:
        asked.append(told)
        raise UsageError("enough")

    monkeypatch.setattr("autopar.tools.bench.run.run_bench", note)
    assert invoke("bench", *FLAGS, "--steps", "1")[0] == 2
    assert invoke("bench", *FLAGS, "--channels-last")[0] == 2
    assert [(told.steps, told.channels_last) for told in asked] == [(1, False), (10, True)]


def test_a_launcher_around_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="Run it without torchrun"):
        run_bench(request())


def test_a_model_that_is_no_classifier_is_refused() -> None:
    code, _, error = invoke("bench", *FLAGS, "--model-kwargs", "num_classes=0", "--img-size", "48")
    assert code == 2, error
