"""The HTML file of a report: sections, figures as data, plotly's script, and a policy that lets nothing else run."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib import resources
from pathlib import Path

from autopar import __version__
from autopar.errors import UsageError
from autopar.ir.html import html_of
from autopar.ir.table import batch_text, precision_text
from autopar.tools.report.html.plots import Figure
from autopar.tools.report.html.sections import Details, Part, ReportInput, key_figures, sections

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {scripts}; base-uri 'none'; "
    "form-action 'none'"
)  # plotly sets styles of elements, and makes images of figures


def page_of(report: ReportInput) -> str:
    """The report as one HTML file that loads nothing; texts of the plan are escaped."""
    from plotly.offline import get_plotlyjs  # an extra

    plan, found = report.plan, sections(report)
    title = f"{plan.model.name} on {plan.mesh.devices:,} × {plan.hardware.device}"
    figures = [part for section in found for part in section.parts if isinstance(part, Figure)]
    scripts = [get_plotlyjs(), f"const figures = {{{', '.join(map(figure_json, figures))}}};\n{resource('page.js')}"]
    cards = "".join(f"<li><b>{escape(number)}</b> {escape(name)}</li>" for number, name in key_figures(report))
    links = "".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in found)
    body = "".join(
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">'
        f'<h2 id="{section.name}-title">{escape(section.title)}</h2>{parts_html(section.parts)}</section>'
        for section in found
    )
    policy = POLICY.format(scripts=" ".join(f"'sha256-{digest(script)}'" for script in scripts))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="autopar {__version__}">
<title>{escape(title)}</title>
<style>{resource("page.css")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{escape(f"{plan.mesh}, {plan.schedule}, {precision_text(plan)}, batch {batch_text(plan)}")}</p>
<ul class="cards">{cards}</ul>
<nav aria-label="Sections">{links}</nav>
</header>
<main>{body}</main>
<footer>Written by autopar {__version__}. Figures by plotly.js, MIT licence.</footer>
<div id="tip" role="status" hidden></div>
<noscript><p>Figures need JavaScript; tables do not.</p></noscript>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""


def parts_html(parts: Sequence[Part]) -> str:
    """Texts, tables and figures, one below the other."""
    return "".join(map(part_html, parts))


def part_html(part: Part) -> str:
    """A text, a table or a figure."""
    if isinstance(part, Figure):
        return (
            f'<figure><div id="{part.name}" class="plot" style="height: {part.layout["height"]}px" role="img" '
            f'aria-label="{escape(part.label)}"></div><figcaption>{escape(part.caption)}</figcaption></figure>'
        )
    if isinstance(part, Details):
        return f"<details><summary>{escape(part.summary)}</summary>{html_of([part.table])}</details>"
    return html_of([part])


def figure_json(figure: Figure) -> str:
    """A figure as a property of a JavaScript object; no text in it can end the script.

    Raises:
        ValueError: a property that plotly does not know.
    """
    import plotly.graph_objects as go  # an extra

    plot = go.Figure(list(figure.traces), dict(figure.layout) | {"template": "none"})
    return f'"{figure.name}": {plot.to_json()}'


def resource(name: str) -> str:
    """Text of a file of this package."""
    return resources.files("autopar.tools.report.html").joinpath(name).read_text(encoding="utf-8")


def digest(script: str) -> str:
    """SHA-256 of a script, as a content security policy names it."""
    return b64encode(sha256(script.encode()).digest()).decode()


def save_page(page: str, path: Path) -> None:
    """Write the HTML file; its line ends are those of the scripts' digests.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(page, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UsageError(f"Cannot write the report to {path}: {error.strerror}.") from error
