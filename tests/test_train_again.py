"""The same run of ``autopar train`` on other meshes, under torchrun, and after it was killed or interrupted."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest
from train_cli import MAIN, SHORT, invoke, losses, records, start


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the SHORT run on one device."""
    folder = tmp_path_factory.mktemp("alone")
    code, _, error = invoke("train", *SHORT, "--devices", "1", "-o", str(folder))
    assert code == 0, error
    return folder


def test_torchrun_has_the_losses_of_one_device(alone, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--no-python", sys.executable)
    # The first stages read images, the last ones labels; each pipeline has its half of every batch.
    process = start(tmp_path, "-c", MAIN, "train", *SHORT, "--pp", "2", "--dp", "2", "-o", "out", launcher=launcher)
    printed, error = process.communicate(timeout=200)
    assert process.returncode == 0, error[-3000:]
    assert printed.count("test accuracy") == 1  # one rank prints
    assert losses(tmp_path / "out") == pytest.approx(losses(alone), rel=1e-4)
    ours, theirs = (records(folder / "history.jsonl") for folder in (tmp_path / "out", alone))
    assert [h["accuracy"] for h in ours] == pytest.approx([h["accuracy"] for h in theirs], abs=0.011)  # a near tie
    assert [h["test_loss"] for h in ours] == pytest.approx([h["test_loss"] for h in theirs], rel=1e-3)


def test_killed_and_resumed_on_another_mesh(alone, tmp_path):
    process = start(tmp_path, "train", *SHORT, "--devices", "1", "--checkpoint-steps", "3", "-o", "out")
    log = tmp_path / "out" / "steps.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 11):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    code, printed, error = invoke(
        "train", *SHORT, "--devices", "2", "--pp", "2", "--checkpoint-steps", "3", "-o", str(tmp_path / "out"),
        "--resume", str(tmp_path / "out"),
    )  # fmt: skip
    assert code == 0, error
    assert "epoch 1/2" not in printed and "epoch 2/2" in printed
    assert losses(tmp_path / "out") == pytest.approx(losses(alone), rel=1e-4)


def test_ctrl_c_says_how_to_go_on(tmp_path):
    process = start(tmp_path, "train", *SHORT, "--devices", "1", "--epochs", "90", "-o", "out")
    log = tmp_path / "out" / "history.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 2):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert re.search(
        r"Interrupted in epoch \d+, after \d updates\. Go on with the same flags and --resume out/last\n", error
    )
    assert "Traceback" not in error


def test_another_run_is_not_resumed(alone):
    code, _, error = invoke(
        "train", *SHORT, "--devices", "1", "--seed", "3", "--batch-size", "64", "--epochs", "5", "--resume", str(alone),
        "--smoothing", "0.25", "--scale", "0.5", "1.0",
    )  # fmt: skip
    assert code == 2
    assert "this would change --seed from 0 to 3, --batch-size from 32 to 64" in error, error
    assert "--epochs (the length of the schedule) from 2 to 5" in error
    assert "--scale from None to [0.5, 1.0], --smoothing from " in error and " to 0.25" in error
