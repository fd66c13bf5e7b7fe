"""Rich tables and texts as HTML."""

from __future__ import annotations

import re

from rich.table import Column
from rich.text import Text

from autopar.ir.html import html_of, preformatted
from autopar.ir.text import labelled, numeric, plain_table

HOSTILE = "<script>x</script>[/b] [red]:smile: & \"'"
ESCAPED = "&lt;script&gt;x&lt;/script&gt;[/b] [red]:smile: &amp; &quot;&#x27;"


def cells(html: str) -> list[tuple[str, str]]:
    """(tag, content) of every cell."""
    return re.findall(r"<(td|th)(?: [^>]*)?>(.*?)</t[dh]>", html, re.DOTALL)


def test_a_table_has_its_header_rows_and_alignment() -> None:
    table = plain_table("name", *numeric("step"))
    table.add_row("pp 2", "1.5 ms", style="yellow")
    table.add_row("a\nb", "20.0 ms")
    html = html_of([table])
    assert cells(html) == [("th", "name"), ("th", "step"), ("td", "pp 2"), ("td", "1.5 ms"), ("td", "a\nb"),
                           ("td", "20.0 ms")]  # fmt: skip
    assert html.count("text-align: right; white-space: pre") == 3 and html.count('scope="col"') == 2
    assert html.count("; color: #808000") == 2  # both cells of the yellow row


def test_lines_of_labels_have_row_headers() -> None:
    html = html_of([labelled([("step", "159.1 ms"), ("", "more")])])
    assert cells(html) == [("th", "step"), ("td", "159.1 ms"), ("th", ""), ("td", "more")]
    assert html.count('scope="row"') == 2 and "thead" not in html


def test_everything_is_escaped_and_no_markup_is_read() -> None:
    table = plain_table(Column(HOSTILE))
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, style="bold"))
    html = html_of([table, HOSTILE, Text(HOSTILE), "", labelled([(HOSTILE, HOSTILE)])])
    assert html.count(ESCAPED) == 7
    assert "<script" not in html and html.count("<p>") == 1 and html.count("<pre") == 1


def test_long_texts_are_left_to_the_browser() -> None:
    table = plain_table("text")
    table.add_row("word " * 500)
    (_, (_, content)) = cells(html_of([table]))
    assert content == ("word " * 500).rstrip()
    assert "min-width: 14.3em" in html_of([table])  # but no column is narrower than a few words


def test_preformatted_text_keeps_columns() -> None:
    table = plain_table("a", *numeric("b"))
    table.add_row("x", "1")
    assert re.sub("<[^>]+>", "", preformatted(table, 20)) == "a  b\n────\nx  1"
