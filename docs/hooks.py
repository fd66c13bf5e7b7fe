"""Hooks of the documentation site: pages from the commands' own help, and from files of the root folder."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
COMMANDS = "reference/cli.md"
WIDTH = 100  # columns of the printed help
OF_ROOT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the page of the commands, and those of the root folder."""
    files.append(File.generated(config, COMMANDS, content=commands_page()))
    for name, page in OF_ROOT.items():
        content = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text())
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the root folder lead to their pages."""
    depth = page.file.src_uri.count("/")
    for name, target in OF_ROOT.items():
        inside = "../" * (0 if page.file.src_uri in OF_ROOT.values() else depth + 1) + name
        markdown = markdown.replace(f"]({inside}", f"]({'../' * depth}{target}")
    return markdown


def commands_page() -> str:
    """Markdown with the help of every command."""
    app = importlib.import_module("autopar.tools.cli.app").app
    group: Any = typer.main.get_command(app)
    parts = ["# Commands", help_of(group, "autopar")]
    with group.make_context("autopar", [], resilient_parsing=True) as context:
        for name in group.list_commands(context):
            parts += [f"## autopar {name}", help_of(group.get_command(context, name), f"autopar {name}")]
    return "\n\n".join(parts) + "\n"


def help_of(command: Any, name: str) -> str:
    """Printed help of a command as a block of text."""
    settings = {"max_content_width": WIDTH, "terminal_width": WIDTH, "resilient_parsing": True}
    with command.make_context(name, [], **settings) as context:
        return f"```text\n{command.get_help(context)}\n```"
