"""Code blocks of the documentation's pages: found, run as a reader would, and their output compared.

Python blocks go on from each other, and a block with ``title="train.py"`` is a file that later commands use.
``PYTHONPATH=tests python -m support.pages tutorials/first_plan.md`` runs pages and renews the pictures that they make.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*?) -->\n)?(?P<indent> *)```(?P<language>\w*)(?P<info>[^\n]*)\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.M | re.S,
)
TITLE = re.compile(r'title="([^"]+)"')
PICTURE = re.compile(r"\]\(\.\./pictures/([\w.-]+\.png)\)")
NOT_RUN = "not run: "  # begin of the comment above a block that cannot run here, such as "<!-- not run: 4 GPUs -->"
EXACT = "exact"  # the comment above a block whose numbers are those of any machine, as in plans by a shipped cost model
RUN = ("python", "console", "bash")
NUMBER = re.compile(r"\d[\d,.]*(e[+-]?\d+)?")
TIMEOUT_SECONDS = 300
SEPARATORS = "();<>|&\n"  # characters between commands of a shell
OF_ALL = {"--debug", "--quiet", "--help", "-h"}  # flags of every command


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Args:
        line: number of its first line in the page.
        reason: why it is not run, or empty.
        title: name of the file that it is, or empty.
        exact: whether numbers and spaces of its output are compared too.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str = ""
    title: str = ""
    exact: bool = False


def blocks(text: str, page: str) -> Iterator[Block]:
    """Code blocks of a page, in order."""
    for match in BLOCK.finditer(text):
        note = match["note"] or ""
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.M)
        reason = note.removeprefix(NOT_RUN) if note.startswith(NOT_RUN) else ""
        title = TITLE.search(match["info"])
        line = text[: match.start("code")].count("\n") + 1
        yield Block(page, line, match["language"], code, reason, title[1] if title else "", note == EXACT)


def pages() -> dict[str, list[Block]]:
    """Blocks of each page that are files, or in a language that runs."""
    found = {}
    for path in sorted(DOCS.rglob("*.md")):
        name = str(path.relative_to(DOCS))
        found[name] = [block for block in blocks(path.read_text(), name) if block.language in RUN or block.title]
    return {name: own for name, own in found.items() if own}


def run_page(page: Sequence[Block], folder: Path) -> None:
    """Run the blocks of a page in a folder, in order: Python blocks together go on from each other.

    Raises:
        AssertionError: a block fails, or prints something else than the page shows.
    """
    python: list[str] = []
    for block in page:
        if block.title:
            (folder / block.title).write_text(block.code)
            continue
        if block.reason:
            continue
        if block.language == "python":
            python.append(f"# line {block.line}\n{block.code}")
            continue
        if python:
            run_python(page[0].page, "\n".join(python), folder)
            python = []
        run_commands(block, folder)
    if python:
        run_python(page[0].page, "\n".join(python), folder)


def run_python(page: str, code: str, folder: Path) -> None:
    """Run Python code as a script of its own."""
    script = folder / f"page_{Path(page).stem}.py"  # a library of the page's name is still found
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, f"{page}: {done.stderr[-3000:]}"


def run_commands(block: Block, folder: Path) -> None:
    """Run the commands of a block (lines after ``$`` in a console, all lines of bash) and compare their output."""
    for command, shown in commands(block):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=TIMEOUT_SECONDS, env=environment(),
        )  # fmt: skip
        where = f"docs/{block.page}, line {block.line}: {command}"
        assert done.returncode == 0, f"{where}\n{done.stdout[-5000:]}"
        find = first_different if block.exact else first_missing
        missing = find(shown, done.stdout.splitlines())
        assert missing is None, f"{where} does not print {missing!r}:\n{done.stdout}"


def environment() -> dict[str, str]:
    """Environment in which ``autopar`` and ``python`` are those of the tests, and print as in a terminal."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    as_in_terminal = {"COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **as_in_terminal, "PATH": path, "AUTOPAR_MEASURE_SECONDS": "0"}


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Commands of a block, each with the lines that the page shows as its output."""
    if block.language == "bash":
        yield block.code, []
        return
    command, shown = "", []
    for line in block.code.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], []
        elif command.endswith("\\"):
            command = f"{command}\n{line}"
        else:
            shown.append(line)
    if command:
        yield command, shown


def first_missing(shown: Sequence[str], printed: Sequence[str]) -> str | None:
    """First line of ``shown`` that is not printed after those before it; None if all are.

    Numbers may differ: they depend on the machine. A line with "…" stands for any lines, "…" at the end of a line for
    the rest of it, and several lines may stand for one that is longer than the page is wide.
    """
    remaining = [masked(line) for line in printed]
    place = 0
    while place < len(shown):
        if masked(shown[place]) in ("", "…"):
            place += 1
            continue
        for end in range(place + 1, len(shown) + 1):
            wanted = masked(" ".join(shown[place:end]))
            found = next((number for number, line in enumerate(remaining) if matches(wanted, line)), None)
            if found is not None:
                remaining, place = remaining[found + 1 :], end
                break
        else:
            return shown[place]
    return None


def first_different(shown: Sequence[str], printed: Sequence[str]) -> str | None:
    """First passage of ``shown`` that is not printed, to the character, after those before it; None if all are.

    Lines with "…" alone end passages, and stand for any lines.
    """
    remaining = "\n".join(["", *map(str.rstrip, printed), ""])
    for passage in re.split(r"^…$", "\n".join(map(str.rstrip, shown)), flags=re.M):
        lines = f"\n{passage.strip()}\n"
        if passage.strip() and lines not in remaining:
            return passage.strip()
        remaining = f"\n{remaining.partition(lines)[2]}" if passage.strip() else remaining
    return None


def matches(wanted: str, line: str) -> bool:
    """Whether a masked line of a page shows a printed one, or its beginning and "…"."""
    return line == wanted or (wanted.endswith(" …") and line.startswith(wanted.removesuffix("…")))


def masked(line: str) -> str:
    """A line with its numbers and runs of spaces replaced."""
    return re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip()


def shell_words(code: str) -> list[str]:
    """Words of commands of a shell; what separates commands is a word too."""
    lexer = shlex.shlex(code.replace("\\\n", " "), posix=True, punctuation_chars=SEPARATORS)
    lexer.whitespace, lexer.whitespace_split = " \t", True
    return list(lexer)


def unknown_flags(block: Block) -> list[str]:
    """Flags of autopar's commands in a block that no command has."""
    import typer

    from autopar.tools.cli.app import app

    group = typer.main.get_command(app)
    words = shell_words("\n".join(command for command, _ in commands(block)))
    found, known = [], None
    for word, following in zip(words, [*words[1:], ""]):
        if word == "autopar" and following in group.commands:  # type: ignore[attr-defined]
            own = group.commands[following].params  # type: ignore[attr-defined]
            known = {flag for parameter in own for flag in (*parameter.opts, *parameter.secondary_opts)} | OF_ALL
        elif set(word) <= set(SEPARATORS):
            known = None
        elif known is not None and re.match(r"--?[a-z]", word) and word.split("=")[0] not in known:
            found.append(word)
    return found


def pictures(page: str) -> list[str]:
    """Names of the pictures that a page shows and that one of its commands makes."""
    text = (DOCS / page).read_text()
    made = " ".join(block.code for block in blocks(text, page) if block.language in RUN and not block.reason)
    return [name for name in dict.fromkeys(PICTURE.findall(text)) if re.search(rf"\s{re.escape(name)}\s", made)]


def unused_files(page: Sequence[Block]) -> list[str]:
    """Titles of blocks that are files and that no later block names, so that nothing runs them."""
    found = []
    for place, block in enumerate(page):
        module = re.escape(block.title.removesuffix(".py"))
        named = re.compile(rf"{re.escape(block.title)}|(from|import) {module}\b|\b{module}:")
        if block.title and not any(named.search(later.code) for later in page[place + 1 :]):
            found.append(block.title)
    return found


def main(names: Sequence[str]) -> None:
    """Run pages in empty folders, and copy the pictures that they make."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            run_page(pages()[name], Path(folder))
            for picture in pictures(name):
                shutil.copy(Path(folder) / picture, DOCS / "pictures" / picture)


if __name__ == "__main__":
    main(sys.argv[1:])
