"""Rich tables and texts as HTML, for notebooks and reports; independent of their content."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from io import StringIO

from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.table import Column, Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

WIDTH = 200  # columns for which tables are made; the browser wraps their cells
MAX_COLUMNS = 4000  # no text is wrapped before the browser does it
TABLE_STYLE = "border-collapse: collapse; border: none; color: inherit; margin: 0 0 0.6em 0"
CELL_STYLE = "padding: 0.2em 0.8em 0.2em 0; border: none; vertical-align: top; background: none"
HEADER_STYLE = "border-bottom: 1px solid currentcolor"
PRE = '<pre style="overflow-x: auto">{}</pre>'
LETTER_EM, NARROWEST_TEXT = 0.55, 26  # mean width of a letter; letters for which a text has room at least


def html_of(parts: Sequence[RenderableType]) -> str:
    """Rich tables and texts, one below the other, as HTML with inline styles; all texts are escaped.

    Colours of the surrounding page hold wherever a text has none. Empty texts separate parts of a terminal's output
    and are left out.
    """
    console = html_console(MAX_COLUMNS)
    pieces = []
    for part in parts:
        if isinstance(part, Table):
            pieces.append(table_html(console, part))
        elif isinstance(part, Text):
            pieces.append(PRE.format(cell_html(console, part)))
        elif part:
            pieces.append(f"<p>{cell_html(console, part)}</p>")
    return f"<div>{''.join(pieces)}</div>"


def preformatted(content: RenderableType, columns: int) -> str:
    """Anything that rich renders in so many columns, as HTML with its line breaks and spaces."""
    return PRE.format(cell_html(html_console(columns), content))


def html_console(columns: int) -> Console:
    """Console that renders for HTML: names of models may have brackets and colons."""
    return Console(
        file=StringIO(), width=columns, force_terminal=True, force_jupyter=False, color_system="truecolor",
        highlight=False, legacy_windows=False, markup=False, emoji=False,
    )  # fmt: skip


def table_html(console: Console, table: Table) -> str:
    """A table; the first column of one without a header names its rows."""
    cells = [[cell_html(console, content) for content in column.cells] for column in table.columns]
    styles = [column_css(column, texts) for column, texts in zip(table.columns, cells, strict=True)]
    head = "".join(
        f'<th scope="col" style="{style}; {HEADER_STYLE}">{cell_html(console, column.header)}</th>'
        for column, style in zip(table.columns, styles, strict=True)
    )
    rows = []
    for row, texts in zip(table.rows, zip(*cells, strict=True), strict=True):
        shown = [f"{style}; {css_of(column.style)}; {css_of(row.style)}".rstrip("; ")
                 for column, style in zip(table.columns, styles, strict=True)]  # fmt: skip
        named = [] if table.show_header else [f'<th scope="row" style="{shown[0]}; white-space: pre">{texts[0]}</th>']
        filled = [f'<td style="{style}">{text}</td>' for style, text in zip(shown, texts, strict=True)][len(named) :]
        rows.append(f"<tr>{''.join([*named, *filled])}</tr>")
    header = f"<thead><tr>{head}</tr></thead>" if table.show_header else ""
    body = f"<tbody>{''.join(rows)}</tbody>"
    return f'<div style="overflow-x: auto"><table style="{TABLE_STYLE}">{header}{body}</table></div>'


def column_css(column: Column, texts: Sequence[str]) -> str:
    """CSS of a column's cells: numbers are never wrapped, texts only where they are long."""
    align = column.justify if column.justify in ("right", "center") else "left"
    if column.no_wrap or align == "right":
        return f"{CELL_STYLE}; text-align: {align}; white-space: pre"
    longest = max((len(line) for text in texts for line in text.split("\n")), default=0)
    width = f"min-width: {LETTER_EM * min(longest, NARROWEST_TEXT):.1f}em"
    return f"{CELL_STYLE}; text-align: {align}; white-space: pre-wrap; {width}"


def css_of(style: str | Style | None) -> str:
    """CSS of a rich style; empty for none."""
    parsed = Style.parse(style) if isinstance(style, str) else style
    return parsed.get_html_style(DEFAULT_TERMINAL_THEME) if parsed is not None else ""


def cell_html(console: Console, content: RenderableType) -> str:
    """Lines of a cell, escaped, with styles where they have any, without spaces at their ends."""
    segments = Segment.simplify(Segment.filter_control(console.render(content)))
    spans = []
    for line in Segment.split_lines(segments):
        while line and not line[-1].text.strip():
            line.pop()
        texts = [*(s.text for s in line[:-1]), *(s.text.rstrip() for s in line[-1:])]
        spans.append("".join(span(text, segment.style) for text, segment in zip(texts, line, strict=True)))
    return "\n".join(spans).rstrip("\n")


def span(text: str, style: Style | None) -> str:
    """Escaped text, in a span if it is styled."""
    css = css_of(style)
    return f'<span style="{css}">{escape(text)}</span>' if css else escape(text)
