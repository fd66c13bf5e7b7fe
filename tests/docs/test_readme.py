"""README.md shows what there is: its script runs, its commands are those of pages, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.pages import blocks, commands, first_different, pages, unknown_flags

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = [*blocks(TEXT, "README.md")]
(PYTHON,) = [block.code for block in BLOCKS if block.language == "python"]
COMMANDS = [block for block in BLOCKS if block.language in ("console", "bash")]
RUN_BY = re.compile(r"docs/(\S+\.md) runs it")  # why a block is not run here
SMALLER = {
    '"test_vit"': '"test_vit", img_size=32',
    "torch.randn(32, 3, 160, 160)": "torch.randn(4, 3, 32, 32)",
    "(32,)": "(4,)",
    "devices=2, batch_size=32": "devices=1, batch_size=4",
}


def test_the_script_runs_at_toy_size(capsys: pytest.CaptureFixture[str]) -> None:
    script = PYTHON
    for long, short in SMALLER.items():
        assert script.count(long) == 1, long
        script = script.replace(long, short)
    exec(script, {})
    assert len(re.findall(r"^loss \d\.\d+$", capsys.readouterr().out, re.MULTILINE)) == 3


def test_the_script_is_that_of_the_start_page() -> None:
    """The page runs it with 2 processes."""
    assert PYTHON in [block.code for block in pages()["index.md"] if block.title == "train.py"]


def test_commands_are_those_that_pages_run() -> None:
    """A command that a page runs is the page's to the character, and so is what it prints."""
    run_by_pages = 0
    for block in COMMANDS:
        assert block.reason and unknown_flags(block) == [], block.code
        page = RUN_BY.match(block.reason)
        if page:
            run = {command: shown for own in pages()[page[1]] if not own.reason for command, shown in commands(own)}
            for command, shown in commands(block):
                assert first_different(shown, run[command]) is None
                run_by_pages += 1
    assert run_by_pages == 3


def test_links_lead_to_files_and_headings() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", TEXT)
    assert len(links) > 30
    for path, heading in links:
        text = (ROOT / path).read_text()
        headings = [re.sub(r"[^\w\s-]", "", line).strip().lower() for line in re.findall(r"^#+ (.+)$", text, re.M)]
        assert not heading or heading in [name.replace(" ", "-") for name in headings], f"{path}#{heading}"


def test_it_is_short() -> None:
    assert len(TEXT.split()) < 2000
