"""Printed and JSON form of the findings of ``autopar doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import autopar
from autopar.ir.text import NONE
from autopar.tools.doctor.finding import Finding, Status
from autopar.tools.doctor.page import Page

STYLES: dict[Status, str] = {"ok": "green", "slow": "yellow", "broken": "red", "absent": "dim"}
NAME_CELLS, MAX_NAME_CELLS = 18, 34


def doctor_parts(page: Page) -> Sequence[RenderableType]:
    """A block of lines for each section, remedies below the lines that need one, and the numbers of all statuses."""
    parts: list[RenderableType] = []
    for section, findings in groupby(page.findings, key=lambda finding: finding.section):
        parts += [Text(section, style="bold"), section_table(list(findings)), ""]
    return [*parts, Text(summary(page))]


def section_table(findings: Sequence[Finding]) -> Table:
    """A line for each finding: status, name, value; its remedy below the value."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=max(map(len, STYLES)), no_wrap=True)
    table.add_column(min_width=NAME_CELLS, max_width=MAX_NAME_CELLS, overflow="fold")
    table.add_column(overflow="fold")
    for finding in findings:
        word = NONE if finding.status == "absent" else finding.status
        table.add_row(Text(word, style=STYLES[finding.status]), Text(finding.name), Text(finding.value))
        if finding.remedy:
            table.add_row("", "", Text(f"→ {finding.remedy}", style=STYLES[finding.status]))
    return table


def summary(page: Page) -> str:
    """``14 ok, 1 slow, 0 broken``."""
    return ", ".join(f"{page.counts[status]} {status}" for status in ("ok", "slow", "broken"))


def doctor_data(page: Page) -> dict[str, Any]:
    """The page as JSON types; `autopar.tools.cli.doctor` documents the keys."""
    return {
        "autopar": autopar.__version__,
        "exit_code": page.exit_code,
        "summary": page.counts,
        "findings": [asdict(finding) for finding in page.findings],
    }
