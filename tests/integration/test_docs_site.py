"""The documentation site, built from this repository and opened in a real browser on a small screen."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag

import pytest
from nightly import nightly

from weighin.cli.app import app

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
NARROW_PIXELS = 400
NAMES = "els => els.flatMap(el => [el.id, el.getAttribute('name')]).filter(Boolean)"
BY_DAY = {"index.html", "figures.html", "commands.html", "results.html", "example/report.html"}
"""The pages that are opened by day; at night, every page is."""
WIDTH = "() => document.documentElement.scrollWidth"


@dataclass
class Visited:
    """One page of the site, as the browser saw it."""

    text: str
    width: int
    links: list[str]
    anchors: set[str]
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site without a word for each request."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` writes it; any warning, such as a dead link, ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=["by day", *nightly("all")])
def visited(
    request: pytest.FixtureRequest, site: Path, address: str, browser: Browser
) -> dict[str, Visited]:
    """Pages of the site by their addresses, opened on a small screen."""
    pages = {}
    context = browser.new_context(viewport={"width": NARROW_PIXELS, "height": 800})
    found = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert found >= BY_DAY
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        if request.param == "by day" and name not in BY_DAY:
            continue
        pages[address + name] = visit(context, address + name)
    context.close()
    return pages


def visit(context: BrowserContext, url: str) -> Visited:
    page = context.new_page()
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    page.goto(url)
    seen = Visited(
        text=page.locator("body").inner_text(),
        width=page.evaluate(WIDTH),
        links=page.eval_on_selector_all("a[href]", "els => els.map(el => el.href)"),
        anchors=set(page.eval_on_selector_all("[id], a[name]", NAMES)),
        requests=[*requests],
        complaints=[*complaints],
    )
    page.close()
    return seen


def test_no_page_complains_or_asks_for_anything_from_elsewhere(
    visited: dict[str, Visited], address: str
) -> None:
    assert {url: one.complaints for url, one in visited.items() if one.complaints} == {}
    foreign = {url: [r for r in one.requests if not r.startswith(address)] for url, one in visited.items()}  # fmt: skip
    assert {url: requests for url, requests in foreign.items() if requests} == {}


def test_no_link_within_the_site_is_dead(
    visited: dict[str, Visited], site: Path, address: str
) -> None:
    dead = []
    for page, one in visited.items():
        for link in one.links:
            target, anchor = urldefrag(link)
            if not target.startswith(address):
                continue
            target += "index.html" if target.endswith("/") else ""
            is_there = (site / unquote(target.removeprefix(address))).is_file()
            is_known = anchor and target in visited
            if not is_there or (is_known and unquote(anchor) not in visited[target].anchors):
                dead.append((page, link))
    assert dead == []


def test_no_page_scrolls_sideways_on_a_small_screen(visited: dict[str, Visited]) -> None:
    assert {url: one.width for url, one in visited.items() if one.width > NARROW_PIXELS} == {}


def test_every_command_is_on_the_page_of_commands(
    visited: dict[str, Visited], address: str
) -> None:
    text = visited[f"{address}commands.html"].text
    verbs = set(app.commands) - {"cache"} | {"cache list", "cache clear"}
    assert [verb for verb in verbs if f"weighin {verb}\n" not in text.replace("¶", "\n")] == []


def test_a_published_run_s_report_is_linked_and_opens(
    visited: dict[str, Visited], address: str
) -> None:
    report = f"{address}example/report.html"
    assert report in visited[f"{address}figures.html"].links
    assert "gpt2-xl" in visited[report].text
    assert "oom_killed" in visited[report].text


def test_the_search_finds_a_page(browser: Browser, address: str) -> None:
    page = browser.new_page()
    page.goto(address)
    box = page.get_by_role("textbox", name="Search")
    box.click()
    # Until the index is loaded, this line says "Initializing search".
    page.locator(".md-search-result__meta", has_text="Type to start").wait_for(timeout=60_000)
    box.press_sequentially("bisection")
    page.locator(".md-search-result__item a[href*='/results.html']").first.wait_for(timeout=60_000)
    page.close()
