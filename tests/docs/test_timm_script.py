"""The diff of docs/timm_script.md: it fits a script of the same structure, which then has the losses of one device."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
from packaging.version import Version
from PIL import Image

pytestmark = pytest.mark.skipif(Version(timm.__version__) < Version("1.0.31"), reason="timm's script has no task yet")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "timm_script.py"
PAGE = (ROOT / "docs" / "timm_script.md").read_text()
HUNK = re.compile(r"^@@ -\d+,(\d+) \+\d+,(\d+) @@.*\n((?:[ +-].*\n)+)", re.MULTILINE)
MODEL = ["--model-kwargs", "img_size=32", "patch_size=8", "depth=2", "embed_dim=48", "num_heads=3"]


def diff() -> str:
    (text,) = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return text


def applied(text: str, script: str) -> str:
    """A script with the hunks of a diff, each of whose old lines it must have once."""
    hunks = HUNK.findall(text)
    assert len(hunks) == text.count("@@ -")
    for num_old, num_new, body in hunks:
        lines = body.splitlines(keepends=True)
        old = [line[1:] for line in lines if line[0] in " -"]
        new = [line[1:] for line in lines if line[0] in " +"]
        assert (len(old), len(new)) == (int(num_old), int(num_new))
        assert script.count("".join(old)) == 1, body
        script = script.replace("".join(old), "".join(new))
    return script


def test_five_lines_are_new_and_none_is_gone() -> None:
    lines = [line for line in diff().splitlines() if not line.startswith(("---", "+++", "@@", " "))]
    assert [line[0] for line in lines] == ["+"] * 5
    assert not any(";" in line for line in lines) and max(map(len, lines)) <= 121


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 48 training and 20 test images in 4 classes, which differ in colour."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, number in (("train", 12), ("validation", 5)):
        for label in range(4):
            (folder / split / str(label)).mkdir(parents=True)
            for i in range(number):
                pixels = rng.normal([60 + 120 * (label % 2), 60 + 120 * (label // 2), 100], 40, (32, 32, 3))
                Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(folder / split / str(label) / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script with the diff, on two devices."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(applied(diff(), SCRIPT.read_text()).replace("devices=4", "devices=2"))
    return path


def run(script: Path, images: Path, output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), "--data-dir", str(images), "--output", str(output), *MODEL, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def train(script: Path, images: Path, output: Path, *flags: str) -> None:
    done = run(script, images, output, *flags)
    assert done.returncode == 0, done.stderr


def metrics(output: Path) -> list[dict[str, float]]:
    """Metrics of each epoch."""
    with (output / "summary.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def assert_equal(one: list[dict[str, float]], other: list[dict[str, float]], tolerance: float) -> None:
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        assert left == pytest.approx(right, rel=tolerance)


SAME = ("--clip-grad", "0.5", "--layer-decay", "0.8", "--grad-accum-steps", "2", "--sched-on-updates")


@pytest.fixture(scope="module")
def runs(images: Path, changed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each script, ``before`` and ``after`` the change."""
    folder = tmp_path_factory.mktemp("runs")
    for script, name in ((SCRIPT, "before"), (changed, "after")):
        train(script, images, folder / name, *SAME)
    return folder


def test_the_changed_script_has_the_losses_of_the_script(runs: Path) -> None:
    before, after = metrics(runs / "before"), metrics(runs / "after")
    assert len(before) == 2 and before[1]["train_loss"] < before[0]["train_loss"] - 0.05
    assert_equal(after, before, 1e-5)


@pytest.mark.full
def test_each_script_resumes_from_the_checkpoints_of_the_other(images: Path, changed: Path, runs: Path) -> None:
    for script, name, other in ((SCRIPT, "back", "after"), (changed, "forth", "before")):
        train(script, images, runs / name, *SAME, "--resume", str(runs / other / "checkpoint-0.pth.tar"))
    back, forth = metrics(runs / "back"), metrics(runs / "forth")
    assert [row["epoch"] for row in back] == [1]
    assert_equal(forth, back, 1e-5)


FLAGS = {"value": ("--clip-grad", "0.001", "--clip-mode", "value"), "lamb": ("--opt", "lamb"), "amp": ("--amp",)}


@pytest.mark.full
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_flags(flags: tuple[str, ...], images: Path, changed: Path, tmp_path: Path) -> None:
    for script, name in ((SCRIPT, "before"), (changed, "after")):
        train(script, images, tmp_path / name, *flags)
    before, after = metrics(tmp_path / "before"), metrics(tmp_path / "after")
    if "--amp" not in flags:
        assert_equal(after, before, 1e-5)
    losses = [row["train_loss"] for row in before]
    assert [row["train_loss"] for row in after] == pytest.approx(losses, rel=4e-3)  # bfloat16 has 8 bits


REFUSED = {
    "agc": (("--clip-grad", "0.1", "--clip-mode", "agc"), "clip_grad_agc"),
    "averages": (("--model-ema",), "A prepared module cannot be copied"),
}


@pytest.mark.full
@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(flags: tuple[str, ...], message: str, images: Path, changed: Path, tmp_path: Path) -> None:
    done = run(changed, images, tmp_path / "out", *flags)
    assert done.returncode == 1 and "UsageError: " in done.stderr and message in done.stderr, done.stderr
