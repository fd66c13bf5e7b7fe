"""The page of ``autopar report`` in a real browser, without a network: what is seen, hovered, clicked and printed.

Pictures of the pages are in the folder of pytest's ``--basetemp``, for people to look at.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.explained_plans import VIT, by_hand, planned
from support.report_pages import bench_of, full_plan

from autopar.ir.plan import Plan
from autopar.tools.report.html.page import page_of, save_page
from autopar.tools.report.html.sections import Measured, ReportInput

sync_api = pytest.importorskip("playwright.sync_api")

DESKTOP, PHONE = (1200, 900), (390, 844)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
FIGURES = ("model", "timeline", "memory", "breakdown", "alternatives")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None and not os.environ.get("CI"):
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    assert program is not None, f"CI installs one of {', '.join(BROWSERS)}"
    with sync_api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=list(FLAGS))
        yield opened
        opened.close()


@dataclass
class OpenPage:
    """A page in the browser, with everything that it asked for and complained about."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Function that opens the report of a plan in a window of some size."""
    contexts = []

    def open_report(plan: Plan, size: tuple[int, int], measured: bool = False, touch: bool = False) -> OpenPage:
        file, result = tmp_path / "report.html", bench_of(plan) if measured else None
        save_page(page_of(ReportInput.of(plan, Measured(result, result.rows[0]) if result else None, ())), file)
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, offline=True, has_touch=touch, is_mobile=touch
        )
        contexts.append(context)
        found = OpenPage(context.new_page())
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("console", lambda message: found.complaints.append(message.text))
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.on("dialog", lambda dialog: found.complaints.append(dialog.message))
        found.page.goto(file.as_uri())
        found.page.locator(".plot .main-svg").first.wait_for()
        found.page.screenshot(path=tmp_path / f"page-{size[0]}.png", full_page=True)
        return found

    yield open_report
    for context in contexts:
        context.close()


def plan_of(name: str) -> Plan:
    if name == "by hand":
        return full_plan()
    if name == "shards":
        return planned(VIT.name, 2, ("tp", 2), ("microbatches", 2))
    if name == "chunks":
        return planned(VIT.name, 2, ("pp", 2), ("schedule", "interleaved"), ("chunks", 2), ("microbatches", 4))
    return by_hand([(1.0, 2.0)] * 32, microbatches=32)


def sizes(page: Any, selector: str) -> list[tuple[float, float]]:
    """Width and height of every element that a selector names, pixels."""
    script = "all => all.map(e => e.getBoundingClientRect()).map(box => [box.width, box.height])"
    return [tuple(size) for size in page.locator(selector).evaluate_all(script)]


def middle(page: Any, selector: str, number: int) -> tuple[float, float]:
    """Middle of one of these elements in the window, scrolled to."""
    element = page.locator(selector).nth(number)
    element.scroll_into_view_if_needed()
    page.wait_for_timeout(100)  # the scroll event hides what is shown
    box = element.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", ["by hand", "shards", "chunks", "many stages"])
def test_figures_are_drawn_and_fit_the_window(name: str, size: tuple[int, int], opened: Any) -> None:
    plan = plan_of(name)
    found = opened(plan, size, measured=name == "by hand", touch=size == PHONE)
    page = found.page
    assert found.complaints == [] and [url for url in found.requests if not url.startswith("file:")] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    for figure in FIGURES if plan.alternatives else FIGURES[:-1]:
        ((width, height),) = sizes(page, f"#{figure} .main-svg:first-of-type")
        assert 0.8 * min(size[0], 1120) < width <= size[0] and height > 100, figure
    for figure in ("model", "timeline", "breakdown"):
        bars = sizes(page, f"#{figure} .bars .point path")
        assert bars and max(bars)[0] > (4 if figure == "timeline" else 0.1 * size[0]), figure
        assert all(height > 6 for _, height in bars), figure
    assert len(sizes(page, "#model .bars .point")) == max(len(plan.block_costs), len(plan.stages))
    assert all(width > 100 for width, _ in sizes(page, "#memory .scatterlayer .js-line"))
    fonts = "all => all.filter(e => e.innerText.trim()).map(e => parseFloat(getComputedStyle(e).fontSize))"
    assert min(page.locator("h1, h2, p, td, th, figcaption, li, summary, nav a").evaluate_all(fonts)) >= 14


def test_the_sharding_of_a_block_is_on_hover(opened: Any) -> None:
    page = opened(plan_of("shards"), DESKTOP).page
    tip = page.locator("#tip")
    assert not tip.is_visible()
    page.mouse.move(*middle(page, "#model .bars .point path", 3))
    tip.wait_for(state="visible")
    lines = tip.inner_text().splitlines()
    assert lines[0] == "blocks.1" and "mlp.fc1: rows / 2" in lines
    box, window = tip.bounding_box(), page.viewport_size
    assert box["y"] >= 0 and box["y"] + box["height"] <= window["height"] and box["x"] + box["width"] <= window["width"]
    page.keyboard.press("Escape")
    tip.wait_for(state="hidden")


def test_a_tap_shows_it_on_a_phone(opened: Any) -> None:
    page = opened(plan_of("shards"), PHONE, touch=True).page
    page.touchscreen.tap(*middle(page, "#model .bars .point path", 3))
    page.locator("#tip").wait_for(state="visible")
    assert page.locator("#tip").inner_text().startswith("blocks.1\n")
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE[0]


def test_a_legend_entry_hides_its_bars(opened: Any) -> None:
    page = opened(plan_of("by hand"), DESKTOP, measured=True).page
    bars = page.locator("#timeline .bars .point")
    before = bars.count()
    page.locator("#timeline .legend .traces", has_text="backward").locator(".legendtoggle").click()
    sync_api.expect(bars).to_have_count(before - 2 * 2 * 4)  # of two ranks, predicted and measured, four microbatches


def test_names_are_shown_as_they_are(opened: Any) -> None:
    name = "<b>x</b><img src=x onerror=alert(1)><a href='javascript:alert(2)'>y</a>"
    found = opened(full_plan(name), DESKTOP)
    page = found.page
    assert page.locator("h1").inner_text().startswith(f"{name} on 2 × ")
    assert page.locator("#model .bars text", has_text=f"{name}.2").count() == 1
    page.mouse.move(*middle(page, "#model .bars .point path", 0))
    page.locator("#tip").wait_for(state="visible")
    assert page.locator("#tip").inner_text().startswith(f"{name}.0\n")
    assert page.locator("main img, main a, figure b").count() == 0 and found.complaints == []


def test_every_link_leads_to_a_section(opened: Any) -> None:
    page = opened(plan_of("by hand"), DESKTOP).page
    for link in page.locator("nav a").all():
        link.click()
        assert page.locator(link.get_attribute("href")).bounding_box()["y"] < DESKTOP[1]


def test_the_page_is_printed_with_whole_figures_and_all_tables(opened: Any, tmp_path: Path) -> None:
    found = opened(plan_of("many stages"), DESKTOP)
    page = found.page
    page.evaluate(
        """addEventListener("beforeprint", () => {
          window.printed = [...document.querySelectorAll(".plot .main-svg")].map(svg => svg.clientWidth);
          window.closed = document.querySelectorAll("details:not([open])").length;
        })"""
    )
    pdf = page.pdf(path=tmp_path / "report.pdf", format="A4", print_background=True)
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
    widths = page.evaluate("window.printed")
    assert widths and max(widths) <= 690 and page.evaluate("window.closed") == 0
    sync_api.expect(page.locator("#model .main-svg").first).to_have_attribute("width", re.compile("1[01]..(px)?"))
    assert page.locator("details[open]").count() == 0 and found.complaints == []
