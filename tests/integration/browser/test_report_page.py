"""The HTML report in a real browser: sorting, width, and no request to anywhere; and the site of the docs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typed import ROOT

sys.path.append(str(ROOT / "tests" / "unit"))
from factories import make_cell, make_result, mixed_run, notebook_run, write_samples

from weighin.records.series import Measured
from weighin.result import Result
from weighin.show import write
from weighin.units import GIB

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

NAMES = ["baseline", "sequential", "meta_copy", "mmap_assign", "per_param", "streaming"]
Open = Callable[..., "Opened"]


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


@dataclass
class Opened:
    """A page in the browser, and all that it asked for or complained of."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def column(self, cell: str = "th") -> list[str]:
        """The texts of a column of the table, in its order: of the strategies, if no other."""
        rows = self.page.locator("section[aria-label='All results'] tbody tr:visible")
        return [text.strip() for text in rows.locator(cell).all_inner_texts()]


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Open the report of some results; at the end nothing may have gone wrong in any page."""
    opened: list[Opened] = []

    def open_page(
        results: Sequence[Result], *, warnings: Sequence[str] = (), **options: Any
    ) -> Opened:
        for result in results:
            if result.samples_path:
                write_samples(tmp_path, result)
        path = tmp_path / f"report{len(opened)}.html"
        measured = Measured(results, warnings, folder=tmp_path)
        page = write.report_html(measured, {name: one.svg for name, one in write.draw(measured)})
        path.write_text(page, encoding="utf-8")
        options = {"viewport": {"width": 1280, "height": 900}} | options
        one = Opened(browser.new_context(**options).new_page())
        opened.append(one)
        one.page.set_default_timeout(30_000)
        one.page.on("request", lambda request: one.requests.append(request.url))
        one.page.on("console", lambda message: one.complaints.append(message.text))
        one.page.on("pageerror", lambda error: one.complaints.append(str(error)))
        one.page.goto(path.as_uri())
        return one

    yield open_page
    for number, one in enumerate(opened):
        assert one.complaints == []
        assert one.requests == [(tmp_path / f"report{number}.html").as_uri()]
        one.page.context.close()


def test_a_heading_sorts_both_ways_and_what_was_not_measured_stays_last(open_page: Open) -> None:
    opened = open_page(notebook_run())
    assert opened.column() == NAMES
    ready = opened.page.locator("thead th", has_text="ready s")
    ready.click()
    last = ["baseline", "sequential", "meta_copy"]
    assert opened.column() == ["mmap_assign", "streaming", "per_param", *last]
    assert ready.get_attribute("aria-sort") == "ascending"
    ready.press("Enter")
    assert opened.column() == ["per_param", "streaming", "mmap_assign", *last]
    assert ready.get_attribute("aria-sort") == "descending"
    opened.page.locator("thead th", has_text="strategy").click()
    assert opened.column() == sorted(NAMES)
    assert ready.get_attribute("aria-sort") == "none"
    opened.page.locator("#words").fill("ok ASSIGN")  # the filter shows the rows with all words
    assert opened.column() == ["mmap_assign"]


def test_limits_are_sorted_by_size_and_no_limit_is_the_largest(open_page: Open) -> None:
    limits = (8 * GIB, None, 7000 * 1024**2, 16 * GIB)
    opened = open_page([make_result(make_cell(ram_limit_bytes=limit)) for limit in limits])
    opened.page.locator("thead th", has_text="RAM limit").last.click()
    assert opened.column("td:nth-child(2)") == ["7000 MiB", "8 GiB", "16 GiB", "none"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_window(open_page: Open, scheme: str, width: int) -> None:
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
    opened = open_page(mixed_run(), warnings=["a warning"], **options)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width


def test_a_name_that_is_a_script_does_not_run(open_page: Open) -> None:
    name = "<img src=http://example.invalid/x onerror=alert(1)>"
    opened = open_page([make_result(make_cell(name), outcome=None), *notebook_run()])
    assert opened.column()[0] == name
    assert opened.page.locator("img").count() == 0


@pytest.mark.slow
def test_the_site_of_the_docs_is_built_without_a_warning(tmp_path: Path) -> None:
    """A dead link is one, also of an anchor."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "example" / "report.html").exists()
