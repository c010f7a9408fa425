"""The HTML report in a real browser: sorting, filtering, hovering, keys, and no request to anywhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from factories import make_cell, make_result, mixed_run, notebook_run, write_samples
from sweeps import a_sweep

from weighin.records import run_folder
from weighin.records.series import Measured
from weighin.result import Result
from weighin.show import page as report_page
from weighin.show import write
from weighin.units import GIB

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
NAMES = ["baseline", "sequential", "meta_copy", "mmap_assign", "per_param", "streaming"]


@dataclass
class Opened:
    """A page in the browser, and all that it asked for or complained of."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def rows(self) -> list[str]:
        """The strategies in the order of the table, those that are shown."""
        return [
            text.strip()
            for text in self.page.locator(
                "section[aria-label='All results'] tbody tr:visible th"
            ).all_inner_texts()
        ]

    def hover(self, mark: Locator) -> str:
        """Point at a mark, as a user does who has scrolled there before; returns what is shown."""
        mark.scroll_into_view_if_needed()
        self.settle()
        mark.hover()
        return self.tip()

    def settle(self) -> None:
        """Wait for the event of a scroll, which hides tips: it precedes the second frame."""
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def tip(self) -> str:
        return self.page.locator("#tip:visible").inner_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's own sandbox needs user namespaces, which containers and root do not have.
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Open the report of some results; at the end nothing may have gone wrong in any page."""
    opened: list[Opened] = []

    def open_page(
        results: Sequence[Result],
        *,
        run: Path | None = None,
        warnings: Sequence[str] = (),
        **options: Any,
    ) -> Opened:
        if run is None:
            run = tmp_path
            for result in results:
                if result.samples_path:
                    write_samples(run, result)
        path = tmp_path / f"report {len(opened)}.html"
        measured = Measured(results, warnings, folder=run)
        page = report_page.render(measured, {name: one.svg for name, one in write.draw(measured)})
        path.write_text(page, encoding="utf-8")
        options = {"viewport": {"width": 1280, "height": 900}} | options
        one = Opened(browser.new_context(**options).new_page())
        opened.append(one)
        one.page.set_default_timeout(10_000)
        one.page.on("request", lambda request: one.requests.append(request.url))
        one.page.on("console", lambda message: one.complaints.append(message.text))
        one.page.on("pageerror", lambda error: one.complaints.append(str(error)))
        one.page.goto(path.as_uri())
        return one

    yield open_page
    for one in opened:
        assert one.complaints == []
        assert [url.rpartition("/")[2] for url in one.requests] == [
            f"report%20{opened.index(one)}.html"
        ]
        one.page.context.close()


def test_a_heading_sorts_both_ways_and_what_was_not_measured_stays_last(
    open_page: Callable[..., Opened],
) -> None:
    opened = open_page(notebook_run())
    assert opened.rows() == NAMES
    ready = opened.page.locator("thead th", has_text="ready s")
    ready.click()
    last = ["baseline", "sequential", "meta_copy"]
    assert opened.rows() == ["mmap_assign", "streaming", "per_param", *last]
    assert ready.get_attribute("aria-sort") == "ascending"
    ready.press("Enter")
    assert opened.rows() == ["per_param", "streaming", "mmap_assign", *last]
    assert ready.get_attribute("aria-sort") == "descending"
    opened.page.locator("thead th", has_text="strategy").click()
    assert opened.rows() == sorted(NAMES)
    assert ready.get_attribute("aria-sort") == "none"


def test_limits_are_sorted_by_size_and_no_limit_is_the_largest(
    open_page: Callable[..., Opened],
) -> None:
    limits = (8 * GIB, None, 7000 * 1024**2, 16 * GIB)
    opened = open_page([make_result(make_cell(ram_limit_bytes=limit)) for limit in limits])
    opened.page.locator("thead th", has_text="RAM limit").last.click()
    column = opened.page.locator("section[aria-label='All results'] tbody tr td:nth-child(2)")
    assert column.all_inner_texts() == ["7000 MiB", "8 GiB", "16 GiB", "none"]


def test_the_filter_shows_the_rows_with_all_words(open_page: Callable[..., Opened]) -> None:
    opened = open_page(notebook_run())
    opened.page.locator("#words").fill("ok ASSIGN")
    assert opened.rows() == ["mmap_assign"]
    opened.page.locator("#words").fill("")
    assert opened.rows() == NAMES


def test_a_phase_a_bar_and_a_point_say_on_hover_what_they_are(
    open_page: Callable[..., Opened],
) -> None:
    opened = open_page(notebook_run())
    phase = opened.page.locator("#timeline [data-tip^='build: from 0.00 s']").first
    assert "peak RSS 6.621 GiB (exact)\n" in opened.hover(phase)
    bar = opened.page.locator("#peaks [data-tip^='streaming: ok']").first
    assert "peak RSS 6.7" in opened.hover(bar)
    point = opened.page.locator("#time-over-peak [data-tip^='streaming']").first
    assert "ready in" in opened.hover(point)


def test_a_verdict_says_why(open_page: Callable[..., Opened]) -> None:
    field = open_page(a_sweep()).page.locator("td.thrashes").first
    assert "read again" in (field.get_attribute("data-tip") or "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_window_and_can_be_read(
    open_page: Callable[..., Opened], scheme: str, width: int
) -> None:
    opened = open_page(
        mixed_run(),
        warnings=["a warning"],
        color_scheme=scheme,
        viewport={"width": width, "height": 800},
    )
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert _faint(page) == []


def test_the_button_changes_light_and_dark(open_page: Callable[..., Opened]) -> None:
    page = open_page(notebook_run(), color_scheme="light").page
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    page.get_by_role("button", name="dark", exact=True).click()
    assert page.evaluate(background) == "rgb(20, 23, 28)"
    page.get_by_role("button", name="light", exact=True).click()
    assert page.evaluate(background) == "rgb(255, 255, 255)"


def test_without_scripts_everything_is_there(open_page: Callable[..., Opened]) -> None:
    opened = open_page(notebook_run(), java_script_enabled=False)
    assert opened.rows() == NAMES
    assert opened.page.locator("figure:visible").count() == 3
    assert not opened.page.locator("#filter").is_visible()


@pytest.mark.parametrize("results", [[], [make_result()]], ids=["empty", "one cell"])
def test_small_runs_open_without_complaint(
    open_page: Callable[..., Opened], results: list[Result]
) -> None:
    assert open_page(results).page.locator("h1").is_visible()


def test_a_name_that_is_a_script_does_not_run(open_page: Callable[..., Opened]) -> None:
    name = "<img src=http://example.invalid/x onerror=alert(1)>"
    opened = open_page([make_result(make_cell(name), outcome=None), *notebook_run()])
    assert opened.rows()[0] == name
    assert opened.page.locator("img").count() == 0


def test_the_published_run(open_page: Callable[..., Opened]) -> None:
    run = ROOT / "results" / "published" / "gpt2-xl-8GiB"
    results = run_folder.read(run).results
    opened = open_page(list(results), run=run)
    said = opened.page.locator("section.answer").inner_text()
    assert (
        "With 8 GiB of RAM, 3 of 6 strategies load gpt2-xl: mmap_assign, per_param and streaming."
        in said
    )
    ready = [one.ready_ns for one in results if one.cell.strategy == "streaming" and one.ready_ns]
    assert f"The fastest is streaming, ready in {median(ready) / 1e9:.2f} s" in said


def test_timelines_of_samples_that_a_kernel_gave(open_page: Callable[..., Opened]) -> None:
    run = Path(__file__).parent / "fixtures" / "gpt2-xl-8GiB"  # every 20th sample of two cells
    opened = open_page(run_folder.read(run).results, run=run)
    said = opened.page.locator("#timeline").text_content() or ""
    assert "no samples" not in said
    assert "baseline" in said and "oom_killed" in said


def test_a_row_has_a_link_a_picture_zooms_and_a_phone_says_that_it_scrolls(
    open_page: Callable[..., Opened],
) -> None:
    page = open_page(mixed_run(), viewport={"width": 390, "height": 844}).page
    hint = """element => getComputedStyle(element, "::before").content"""
    assert "scroll sideways" in page.locator("section[aria-label='All results'] .scroll").evaluate(
        hint
    )
    svg = page.locator("#peaks svg").first
    whole = svg.get_attribute("viewBox")
    svg.scroll_into_view_if_needed()
    box = page.locator("#peaks").bounding_box()
    assert box
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 160, box["y"] + 60)
    page.mouse.up()
    width = float((svg.get_attribute("viewBox") or "").split()[2])
    assert width == pytest.approx(
        float((whole or "").split()[2])
        * 100
        / svg.evaluate("one => one.getBoundingClientRect().width"),
        rel=0.01,
    )
    page.locator("#peaks").dblclick(position={"x": 10, "y": 10})
    assert svg.get_attribute("viewBox") == whole
    page.evaluate("location.hash = '#all-results-streaming'")
    assert page.locator("tr.linked th").first.inner_text().startswith("streaming")


def _faint(page: Page) -> list[str]:
    """Texts whose contrast with the page is below 4.5, WCAG's AA."""
    faint: list[str] = page.evaluate(
        """() => {
        const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
        const light = (c) => { const [r, g, b] = c.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const behind = (node) => { for (; node; node = node.parentElement) { const c = parse(getComputedStyle(node).backgroundColor); if (c.length < 4 || c[3]) return c.slice(0, 3); } return [255, 255, 255]; };
        const found = [];
        for (const node of document.querySelectorAll("p, td, th, li, h1, h2, button, label")) {
            if (!node.textContent.trim() || !node.checkVisibility()) continue;
            const style = getComputedStyle(node);
            const [a, b] = [light(parse(node.namespaceURI.includes("svg") ? style.fill : style.color).slice(0, 3)), light(behind(node))];
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (ratio < 4.5) found.push(`${node.textContent.trim().slice(0, 30)} ${ratio.toFixed(2)}`);
        }
        return found;
        }"""
    )
    return faint
