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
from weighin.report.html_page import render
from weighin.result import Result
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
            for text in self.page.locator("#figures tbody tr:visible th").all_inner_texts()
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
        path.write_text(render(run, results, warnings), encoding="utf-8")
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
    ready = opened.page.get_by_role("button", name="ready s")
    ready.click()
    assert opened.rows() == [
        "mmap_assign",
        "streaming",
        "per_param",
        "baseline",
        "sequential",
        "meta_copy",
    ]
    head = opened.page.locator("#figures th", has=ready)
    assert head.get_attribute("aria-sort") == "ascending"
    ready.click()
    assert opened.rows() == [
        "per_param",
        "streaming",
        "mmap_assign",
        "baseline",
        "sequential",
        "meta_copy",
    ]
    assert head.get_attribute("aria-sort") == "descending"
    opened.page.get_by_role("button", name="strategy").click()
    assert opened.rows() == sorted(NAMES)
    assert head.get_attribute("aria-sort") == "none"


def test_limits_are_sorted_by_size_and_no_limit_is_the_largest(
    open_page: Callable[..., Opened],
) -> None:
    limits = (8 * GIB, None, 7000 * 1024**2, 16 * GIB)
    opened = open_page([make_result(make_cell(ram_limit_bytes=limit)) for limit in limits])
    opened.page.get_by_role("button", name="RAM limit").click()
    column = opened.page.locator("#figures tbody tr td:nth-child(2)")
    assert column.all_inner_texts() == ["7000 MiB", "8 GiB", "16 GiB", "none"]


def test_the_filter_holds_for_table_bars_and_timelines(open_page: Callable[..., Opened]) -> None:
    opened = open_page(notebook_run())
    page = opened.page
    page.get_by_label("outcome").select_option("ok")
    assert opened.rows() == ["mmap_assign", "per_param", "streaming"]
    assert page.locator(".bar[data-series]:visible").count() == 3
    assert page.locator("figure[data-series]:visible").count() == 3
    assert page.locator("#shown").inner_text() == "3 of 6 rows"
    page.get_by_label("Search").fill("PARAM")
    assert opened.rows() == ["per_param"]
    page.get_by_role("button", name="Show all").click()
    page.locator("#shown", has_text="6 of 6 rows").wait_for()
    assert opened.rows() == NAMES


def test_a_phase_says_on_hover_what_it_held(open_page: Callable[..., Opened]) -> None:
    opened = open_page(notebook_run())
    figure = opened.page.locator("#timelines figure", has_text="mmap_assign")
    said = opened.hover(figure.locator(".hit").nth(5)).split("\n")
    assert said[:2] == ["touch: from 2.04 s to 7.04 s (5.00 s)", "peak RSS 6.821 GiB (exact)"]
    assert said[-1].startswith("at 4.5")
    assert said[-1].endswith("GiB, anonymous 0.40 (sampled)")
    # Half of the phase: half of 6.42 GiB is read.
    assert 3.4 < float(said[-1].partition("RSS ")[2].partition(" ")[0]) < 3.9
    opened.page.mouse.move(2, 2)
    assert not opened.page.locator("#tip").is_visible()


def test_even_the_shortest_phase_can_be_pointed_at(open_page: Callable[..., Opened]) -> None:
    opened = open_page(notebook_run())
    figure = opened.page.locator("#timelines figure", has_text="mmap_assign")
    said = [opened.hover(figure.locator(".hit").nth(place)) for place in range(7)]
    names = [text.partition(":")[0] for text in said]
    assert names == ["import", "build", "map", "assign", "buffers", "touch", "forward"]


def test_the_arrow_keys_go_from_phase_to_phase(open_page: Callable[..., Opened]) -> None:
    opened = open_page(notebook_run())
    drawing = opened.page.locator("#timelines svg").nth(3)
    drawing.focus()  # scrolls there
    opened.settle()
    names = []
    for _ in range(8):
        opened.page.keyboard.press("ArrowRight")
        names.append(opened.tip().partition(":")[0])
    assert names == ["import", "build", "map", "assign", "buffers", "touch", "forward", "import"]
    opened.page.keyboard.press("ArrowLeft")
    assert opened.tip().startswith("forward:")
    opened.page.keyboard.press("Escape")
    assert not opened.page.locator("#tip").is_visible()


def test_all_that_can_be_used_is_reached_with_the_tab_key(open_page: Callable[..., Opened]) -> None:
    opened = open_page(notebook_run())
    expected = opened.page.locator(
        "button:visible, input:visible, select:visible, [tabindex='0']:visible"
    ).count()
    radios = opened.page.locator("input[type=radio]").count()
    reached = set()
    for _ in range(expected + 5):
        opened.page.keyboard.press("Tab")
        outline = opened.page.evaluate(
            "() => [[...document.querySelectorAll('*')].indexOf(document.activeElement),"
            " getComputedStyle(document.activeElement).outlineStyle, document.activeElement.tagName]"
        )
        if outline[2] != "BODY":
            reached.add(outline[0])
            assert outline[1] != "none"
    assert len(reached) == expected - (radios - 1)  # one stop for a group of radio buttons


def test_a_bar_and_a_point_say_what_they_are(open_page: Callable[..., Opened]) -> None:
    opened = open_page(notebook_run())
    said = opened.hover(opened.page.locator(".bar", has_text="streaming"))
    assert said.split("\n")[:2] == ["streaming: ok", "peak RSS 6.750 GiB (exact)"]
    point = opened.page.locator("#front figure:visible g[data-tip]", has_text="streaming")
    assert opened.hover(point.locator("circle")).split("\n") == [
        "streaming", "peak RSS 6.750 GiB (exact)", "ready in 7.30 s",
        "on the Pareto front: no other is better in both",
    ]  # fmt: skip


def test_a_verdict_says_why(open_page: Callable[..., Opened]) -> None:
    opened = open_page(a_sweep())
    said = opened.hover(opened.page.locator("td.thrashes"))
    assert said.startswith(
        "mmap_assign, 1 GiB: thrashes\n41.0 s, 8.2x the time without a limit: 5.00 s"
    )
    opened.page.get_by_label("Survival under each limit; arrow keys").focus()
    opened.settle()
    opened.page.keyboard.press("ArrowLeft")
    assert opened.tip().startswith("streaming, 1 GiB: killed")


def test_the_figure_of_memory_can_be_chosen(open_page: Callable[..., Opened]) -> None:
    opened = open_page(notebook_run())
    assert opened.page.locator("#front figure:visible").count() == 1
    opened.page.get_by_role("radio", name="anonymous memory").check()
    shown = opened.page.locator("#front figure:visible svg")
    assert (shown.get_attribute("aria-label") or "").startswith(
        "Time until ready over anonymous memory, GiB (sampled). On the front: mmap_assign."
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
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
    assert opened.page.locator("#timelines figure:visible").count() == 6
    assert opened.page.locator("#front figure:visible").count() == 2
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
    said = opened.page.locator("#summary").inner_text()
    assert (
        "With 8 GiB of RAM, 3 of 6 strategies load gpt2-xl: mmap_assign, per_param and streaming."
        in said
    )
    ready = [one.ready_ns for one in results if one.cell.strategy == "streaming" and one.ready_ns]
    assert f"The fastest is streaming, ready in {median(ready) / 1e9:.2f} s" in said


def test_timelines_of_samples_that_a_kernel_gave(open_page: Callable[..., Opened]) -> None:
    run = Path(__file__).parent / "fixtures" / "gpt2-xl-8GiB"  # every 20th sample of two cells
    opened = open_page(run_folder.read(run).results, run=run)
    timelines = opened.page.locator("#timelines")
    assert timelines.locator("figure:visible").count() == 2
    said = timelines.inner_text()
    assert "no samples" not in said
    assert "baseline" in said and "oom_killed" in said


def _faint(page: Page) -> list[str]:
    """Texts whose contrast with the page is below 4.5, WCAG's AA."""
    faint: list[str] = page.evaluate(
        """() => {
        const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
        const light = (c) => { const [r, g, b] = c.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const behind = (node) => { for (; node; node = node.parentElement) { const c = parse(getComputedStyle(node).backgroundColor); if (c.length < 4 || c[3]) return c.slice(0, 3); } return [255, 255, 255]; };
        const found = [];
        for (const node of document.querySelectorAll("p, td, th, dd, dt, figcaption, svg text, .bar span, li, h1, h2, button, label")) {
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
