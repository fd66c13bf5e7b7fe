"""Colours of figures; each has a name in a legend or a label, and they differ in lightness too."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.tools.report.step_bars import COLOURS, shade

INK, MUTED, GRID, IDLE, ALERT = "#1a1f24", "#5a6570", "#e3e7ea", "#eef0f2", "#b3261e"
LIGHTEST = 0.88  # end of the used colour scale; the rest is a yellow that is hard to see on white
ONLY = 0.3  # place of a single position in it
ACTIVITIES: Mapping[str, str] = {
    "compute": COLOURS["forward"],
    "recomputation": COLOURS["recompute"],
    "collectives": "#8c4fa0",
    "transfers": "#7a5c3e",
    "bubble": "#d5dade",
    "reduction": COLOURS["reduction"],
    "optimizer": COLOURS["optimizer"],
}


def position_colour(position: int, positions: int, chunk: int = 0, chunks: int = 1) -> str:
    """Colour of a pipeline position, paler for its earlier chunks: the same in all figures of a plan."""
    from plotly.colors import sample_colorscale  # an extra

    place = LIGHTEST * position / (positions - 1) if positions > 1 else ONLY
    (colour,) = sample_colorscale("viridis", [place], colortype="tuple")
    red, green, blue = map(float, colour)
    return css_of(shade(css_of((red, green, blue)), chunk, chunks))


def text_colour(background: str) -> str:
    """Black or white, whichever is easier to read on a colour ``#rrggbb``.

    Source: relative luminance and contrast of WCAG 2.2.
    """
    parts = (int(background[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def css_of(colour: tuple[float, float, float]) -> str:
    """``#rrggbb`` of red, green and blue from 0 to 1."""
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)
