"""The report in a browser, without a network: charts are drawn and answer, and without scripts everything is there."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import report_folders as folders

from training_lab.record import RunFolder
from training_lab.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")

KINDS: dict[str, Callable[[], RunFolder]] = {
    "finished": folders.finished,
    "gpu": folders.on_gpu,
    "resumed": folders.resumed,
    "killed": folders.killed,
    "hostile": folders.hostile,
    "long": folders.long,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextlib.contextmanager
def page_of(browser: Any, folder: RunFolder, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """The report of a folder in a page of its own, and everything that the page complains of or asks for."""
    path = write_report(folder).resolve()
    context = browser.new_context(offline=True, **options)
    complaints: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("request", lambda request: complaints.extend([request.url] if request.url != path.as_uri() else []))
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    page.goto(path.as_uri())
    if options.get("java_script_enabled", True):
        page.wait_for_selector("html[data-charts=update]", state="attached", timeout=60_000)
    try:
        yield page, complaints
    finally:
        context.close()


def charts(page: Any) -> int:
    """The figures that show a picture."""
    return int(page.locator("figure:has(svg)").count())


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_chart_is_drawn_and_nothing_is_complained_of_or_asked_for(kind: str, browser: Any) -> None:
    with page_of(browser, KINDS[kind]()) as (page, complaints):
        assert charts(page) == page.locator("figure").count() > 5
        assert page.locator("[data-chart] svg .mark-line path, [data-chart] svg .mark-rect path").count() > 10
        assert complaints == []


def test_the_horizontal_axis_can_be_chosen_with_the_keyboard(browser: Any) -> None:
    with page_of(browser, folders.finished()) as (page, complaints):
        loss = page.locator("[data-chart]").filter(has_text="nats").first
        assert "update" in loss.inner_text()
        page.locator("input[name=axis]").first.focus()
        for axis, title in (("tokens", "target tokens"), ("seconds", "training time")):
            page.keyboard.press("ArrowRight")
            page.wait_for_selector(f"html[data-charts*={axis}]", state="attached", timeout=60_000)
            assert title in loss.inner_text()
        assert complaints == []


def test_a_pointer_over_a_curve_is_told_the_numbers(browser: Any) -> None:
    with page_of(browser, folders.finished()) as (page, complaints):
        curve = page.locator("[data-chart] svg").nth(1)
        curve.scroll_into_view_if_needed()
        box = curve.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        tooltip = page.locator("#vg-tooltip-element.visible")
        tooltip.wait_for(timeout=10_000)
        assert re.search(r"update\s*\d", tooltip.inner_text())
        assert complaints == []


@pytest.mark.parametrize("kind", ["finished", "gpu", "hostile"])
def test_without_scripts_figures_and_tables_are_there(kind: str, browser: Any) -> None:
    with page_of(browser, KINDS[kind](), java_script_enabled=False) as (page, complaints):
        assert charts(page) == page.locator("figure").count() > 5
        assert page.locator("figure details table").count() == page.locator("figure details").count() > 5
        page.locator("figure details summary").first.click()
        assert page.locator("figure details table").first.is_visible()
        assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(scheme: str, browser: Any) -> None:
    """WCAG's contrast of 4.5 for the page's words and for the words in its charts."""
    with page_of(browser, folders.finished(), color_scheme=scheme) as (page, _):
        ratios = page.evaluate(
            """() => {
              const light = (text) => {
                const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
                  .map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
              };
              const behind = light(getComputedStyle(document.documentElement).backgroundColor);
              const ratio = (colour) => {
                const [low, high] = [light(colour), behind].sort((a, b) => a - b);
                return (high + 0.05) / (low + 0.05);
              };
              const words = [...document.querySelectorAll("main p, main td, main dd, h2")].slice(0, 200);
              const labels = [...document.querySelectorAll("figure svg .role-axis-label text")].slice(0, 200);
              return [...words.map((one) => ratio(getComputedStyle(one).color)),
                      ...labels.map((one) => ratio(getComputedStyle(one).fill))];
            }"""
        )
        assert len(ratios) > 50
        assert min(ratios) >= 4.5


def test_print_is_on_white_and_shows_no_switches(browser: Any) -> None:
    with page_of(browser, folders.finished(), color_scheme="dark") as (page, _):
        page.emulate_media(media="print", color_scheme="dark")
        behind = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert behind == "rgb(255, 255, 255)"
        assert not page.locator("input[name=axis]").first.is_visible()
        assert len(page.pdf()) > 50_000


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_no_page_is_wider_than_its_screen(width: int, browser: Any) -> None:
    with page_of(browser, folders.hostile(), viewport={"width": width, "height": 800}) as (page, _):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
