"""README.md shows what there is: its Python blocks run as they are pasted, here at toy size and on one device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.effort import only
from typer.testing import CliRunner

from autopar.tools.cli.app import app

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
# What makes a block small; the second one goes on from the first.
SMALLER = (
    {
        '"vit_small_patch16_224", num_classes=10': '"test_vit", img_size=32, num_classes=10',
        "torch.randn(32, 3, 224, 224)": "torch.randn(4, 3, 32, 32)",
        "(32,)": "(4,)",
        "devices=2, batch_size=32": "devices=1, batch_size=4",
    },
    {"devices=2": "devices=1", "batch_size=32": "batch_size=4"},
    {
        "Wanted(side=32)": "Wanted(side=32, num_train=64, num_test=8)",
        "patch_size=8": "patch_size=8, depth=1",
        "devices=2": "devices=1",
        "epochs=10": "epochs=1",
    },
)


def smaller(number: int) -> str:
    """A block with what takes long made small."""
    block = BLOCKS[number]
    for long, short in SMALLER[number].items():
        assert block.count(long) == 1, long
        block = block.replace(long, short)
    return block


def test_the_blocks_that_use_a_model_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(smaller(0), names)
    assert len(re.findall(r"^\d\.\d+$", capsys.readouterr().out, re.MULTILINE)) == 3  # the losses that it prints
    exec(smaller(1), names)
    names["pm"].close()


def test_the_block_that_trains_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(smaller(2), {})
    assert {"last", "history.jsonl"} <= {path.name for path in (tmp_path / "runs" / "mine").iterdir()}


def test_there_is_no_other_block() -> None:
    assert len(BLOCKS) == len(SMALLER)


@pytest.mark.parametrize(
    ("begins", "flags"), only([("sharded  ", ("--tp", "2"))], [("$ autopar plan", ()), ("sharded  ", ("--tp", "2"))])
)
def test_the_plan_is_what_is_printed(begins: str, flags: tuple[str, ...]) -> None:
    command = "plan vit_large_patch16_224 --devices 4 --hardware h200-nvlink"
    (shown,) = re.findall(rf"^```\n({re.escape(begins)}.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    out = CliRunner(env={"COLUMNS": "100"}).invoke(app, [*command.split(), *flags], prog_name="autopar").stdout
    shown = shown.removeprefix(f"$ autopar {command}\n")
    seconds = r"\d\.\d\d s, balancing"
    assert re.sub(seconds, "", shown).strip() in re.sub(seconds, "", out)


def test_the_simulation_is_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (planned,) = re.findall(r"After `autopar (plan [^`]*-o plan\.json)`", TEXT)
    command = "simulate plan.json --schedule gpipe"
    (shown,) = re.findall(rf"^```\n\$ autopar {command}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    assert CliRunner().invoke(app, planned.split(), prog_name="autopar").exit_code == 0
    assert CliRunner().invoke(app, command.split(), prog_name="autopar").stdout == shown
