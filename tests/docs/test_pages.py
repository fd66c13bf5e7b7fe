"""The documentation's pages: their code blocks run as a reader would paste them, and the site builds."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.effort import only
from support.pages import first_different, first_missing, pages, pictures, run_page, unknown_flags, unused_files

PAGES = pages()
NAMES = [name for name, own in PAGES.items() if any(not block.reason for block in own)]
PRINTED = ["model  vit", "", "step  12.5 ms", "bound by  compute", "saved"]


@pytest.mark.parametrize("page", only(["how_to/plans.md"], NAMES))
def test_blocks_run(page: str, tmp_path: Path) -> None:
    run_page(PAGES[page], tmp_path)
    assert [name for name in pictures(page) if not (tmp_path / name).exists()] == []


@pytest.mark.parametrize(
    ("shown", "missing", "different"),
    [
        ([], None, None),
        (PRINTED, None, None),
        (["…", "step  12.5 ms", "…", "saved"], None, None),
        (["step 13.0 ms"], None, "step 13.0 ms"),  # numbers and spaces count for exact blocks alone
        (["step  12.5 ms", "saved"], None, "step  12.5 ms\nsaved"),  # a line between them is left out
        (["saved", "…", "step  12.5 ms"], "step  12.5 ms", "step  12.5 ms"),
        (["loss 1.0"], "loss 1.0", "loss 1.0"),
    ],
)
def test_other_output_is_found(shown: list[str], missing: str | None, different: str | None) -> None:
    assert first_missing(shown, PRINTED) == missing
    assert first_different(shown, PRINTED) == different


def test_blocks_that_are_not_run_are_valid() -> None:
    for own in PAGES.values():
        assert unused_files(own) == [], own[0].page
        for block in own:
            where = f"docs/{block.page}, line {block.line}"
            if block.language == "python":
                compile(block.code, where, "exec")
            elif block.language == "toml":
                tomllib.loads(block.code)
            else:
                assert unknown_flags(block) == [], where


def test_site_builds(tmp_path: Path) -> None:
    """Warnings are errors: links to nowhere, pages outside of the navigation."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "reference" / "cli.html").read_text()
    assert "autopar simulate" in text and "--schedule" in text
    assert "ParallelModel" in (tmp_path / "reference" / "python.html").read_text()
