"""Each example runs to its end as a user would start it, and shows what it promises."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_own_model() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "own_model.py"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert losses[-1] < 0.5 * losses[0]
    difference = re.search(r"largest difference between two devices and one: (\S+)", done.stdout)
    assert difference is not None and float(difference[1]) < 1e-5


def test_compare_meshes() -> None:
    script = str(EXAMPLES / "compare_meshes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run(
        [*command, "test_vit", "--img-size", "160", "--batch", "4", "--steps", "1"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(pp \d × tp \d × dp \d) +\d+ +[\d.]+ ms +[\d.]+ ms +[\d.]+$", done.stdout, re.MULTILINE)
    assert rows == ["pp 1 × tp 1 × dp 2", "pp 2 × tp 1 × dp 1", "pp 1 × tp 2 × dp 1"], done.stdout


SMALL = ("--data", "synthetic", "--limit", "64")
SMALL_VIT = ("--model", "test_vit", "--img-size", "32", *SMALL)


def printed(name: str, *flags: str, torchrun: int = 0) -> str:
    """What an example prints, as a plain script or under torchrun with so many processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
    command = [sys.executable, *launcher, str(EXAMPLES / name), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def column(name: str, text: str) -> list[float]:
    """A figure of each epoch's line."""
    return [float(figure) for figure in re.findall(rf"^epoch .* {name} +([\d.e+-]+)", text, re.MULTILINE)]


def test_vit_pipeline() -> None:
    text = printed("vit_pipeline.py", *SMALL_VIT, "--epochs", "1")
    assert "batch       16 in 4 microbatches of 4" in text and "mesh        pp 2 × tp 1 × dp 1" in text
    assert [1.5 < loss < 3.5 for loss in column("loss", text)] == [True], text


def test_hf_vit_hybrid() -> None:
    sizes = ("--hidden-size", "32", "--layers", "2", "--heads", "2", "--img-size", "32")
    text = printed("hf_vit_hybrid.py", *sizes, *SMALL, "--epochs", "2")
    assert "ViTForImageClassification" in text and "mesh        pp 2 × tp 2 × dp 1" in text
    assert [1.5 < loss < 3.5 for loss in column("loss", text)] == [True] * 2, text


def test_resnet_pipeline() -> None:
    flags = ("--model", "test_resnet", *SMALL, "--epochs", "4", "--warmup-epochs", "2")
    text = printed("resnet_pipeline.py", *flags)
    assert "batch       64 in 4 microbatches of 16" in text and "mesh        pp 2 × tp 1 × dp 1" in text
    assert [1.5 < loss < 3.5 for loss in column("loss", text)] == [True] * 4, text
    rates = column("lr", text)
    assert rates[0] < rates[1] and rates[2] > rates[3], text  # two epochs up, two down


@functools.cache
def losses(parallel: str, devices: int, torchrun: int = 0) -> list[float]:
    """Of each epoch of examples/vit_data_to_hybrid.py."""
    flags = ("--batch-size", "16", "--epochs", "2", "--warmup-epochs", "1", "--parallel", parallel)
    with tempfile.TemporaryDirectory() as output:
        text = printed(
            "vit_data_to_hybrid.py",
            *SMALL_VIT,
            *flags,
            "--devices",
            str(devices),
            "--output",
            output,
            torchrun=torchrun,
        )
        assert {"steps.jsonl", "history.jsonl", "last"} <= {path.name for path in Path(output).iterdir()}
    return column("loss", text)


@pytest.mark.parametrize(("parallel", "devices"), [("data", 2), ("pipeline", 2), ("tensor", 2), ("hybrid", 4)])
def test_vit_data_to_hybrid(parallel: str, devices: int) -> None:
    expected = losses("data", 2, torchrun=2)
    assert len(expected) == 2 and losses(parallel, devices) == pytest.approx(expected, abs=2e-4)


def test_vit_large_batch() -> None:
    flags = ("--devices", "2", "--batch-size", "32", "--grad-accum-steps", "2", "--epochs", "2", "--warmup-epochs", "1")
    text = printed("vit_large_batch.py", *SMALL_VIT, *flags)
    assert [1.5 < loss < 3.5 for loss in column("loss", text)] == [True] * 2, text
    assert column("lr", text)[1] > 1e-3, text


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert all(f'"{path.name}"' in tested for path in EXAMPLES.glob("*.py"))
