"""The HTML report: self-contained, escaped, small, and right for odd runs."""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from factories import (
    ENVIRONMENT,
    SCRIPTS,
    make_cell,
    make_result,
    make_skipped,
    mixed_run,
    notebook_run,
    saving_run,
    write_samples,
)
from ran_commands import make_ran
from sweeps import a_sweep
from test_floors_report import a_search

from weighin.cell import ModelSpec
from weighin.report.html.facts import figures
from weighin.report.html.geometry import Axis, pareto_front, place_labels
from weighin.report.html_page import render
from weighin.report.rows import series
from weighin.report.tables import figures_of
from weighin.result import Outcome, Result
from weighin.units import GIB

VOID = {"meta", "input", "line", "rect", "path", "circle", "br"}
EVIL = "<script>alert(1)</script>\"'&"


class Page(HTMLParser):
    """The page as a tree of open tags: refuses what is not closed, and keeps what tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in {"script", "style"}:
            self.text.append(data)

    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def having(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [
            found
            for name, found in self.tags
            if name == tag and all(found.get(k) == v for k, v in attributes.items())
        ]


def page(run: Path, results: Sequence[Result], warnings: Sequence[str] = ()) -> Page:
    for result in results:
        if result.samples_path:
            write_samples(run, result)
    return Page(render(run, results, warnings))


def test_the_page_of_a_run(tmp_path: Path) -> None:
    found = page(tmp_path, notebook_run())
    words = found.words()
    assert "With 8 GiB of RAM, 3 of 6 strategies load gpt2-xl" in words
    assert len(found.having("svg", **{"class": "marks timeline"})) == 6
    assert "6.820 GiB" in words
    assert "7.988 GiB · oom_killed in read" in words
    tips = [attributes["data-tip"] for attributes in found.having("rect", **{"class": "hit"})]
    assert (
        "touch: from 2.04 s to 7.04 s (5.00 s)\n"
        "peak RSS 6.821 GiB (exact)\n"
        "cgroup peak 6.820 GiB (exact)\n"
        "at its end: anonymous 0.400, file 6.420 GiB (exact)\n"
        "3 major page faults"
    ) in tips
    assert "read: from 10.60 s to 12.12 s (1.52 s)\ncut off: oom_killed" in tips


def test_nothing_is_fetched_and_one_script_is_allowed(tmp_path: Path) -> None:
    text = render(tmp_path, notebook_run())
    for _, attributes in Page(text).tags:
        assert not {"src", "href", "srcset", "action", "background"} & set(attributes)
    assert "url(" not in text
    assert "@import" not in text
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'" in text


def test_names_from_outside_are_escaped_everywhere(tmp_path: Path) -> None:
    evil = make_result(
        make_cell(
            EVIL,
            model=ModelSpec(EVIL, EVIL, {}),
            isolation=EVIL,
            format=EVIL,
            dtype=EVIL,
            options={EVIL: EVIL},
        ),
        [(EVIL, 1.0, 0.1, 0.1), (f"{EVIL}2", 1.0, 0.2, 0.1)],
        Outcome.STRATEGY_FAILED,
        message=EVIL,
        last_phase=f"{EVIL}3",
        environment=ENVIRONMENT | {EVIL: EVIL, "nested": {EVIL: [EVIL]}},
        warnings=(EVIL,),
        started_at=EVIL,
        samples_path="samples/evil.csv",
    )
    others = [replace(evil, cell=make_cell(f"{EVIL}{n}", format="pt")) for n in range(2)]
    good = [replace(one, outcome=Outcome.OK, ready_ns=10**9 * n) for n, one in enumerate(others, 1)]
    write_samples(tmp_path, evil, SCRIPTS["streaming"])
    text = render(tmp_path, [evil, *good], [EVIL])
    assert "<script>alert" not in text
    assert text.count("<script") == 1
    found = Page(text)  # and no quote ends an attribute
    assert not [name for _, attributes in found.tags for name in attributes if "alert" in name]
    assert EVIL in " ".join(found.text)


def test_a_run_in_which_much_went_wrong(tmp_path: Path) -> None:
    found = page(tmp_path, mixed_run(), ["records.jsonl, line 7 is incomplete"])
    rows = [attributes["data-outcome"] for attributes in found.having("tr") if "data-outcome" in attributes]  # fmt: skip
    assert rows == [
        "ok", "oom_killed", "timeout", "skipped", "strategy_failed", "wrong_weights",
    ]  # fmt: skip
    words = found.words()
    assert "Warnings records.jsonl, line 7 is incomplete" in words
    assert "direct_cuda: skipped" in words
    assert "not run" in words
    assert "not measured" in words
    assert "broken : strategy_failed in read: KeyError: 'h.0.attn|bias'" in words


def test_a_run_of_one_cell_has_no_front(tmp_path: Path) -> None:
    found = page(tmp_path, [make_result()])
    assert not found.having("section", id="front")
    assert "Survival" not in found.words()
    assert found.having("section", id="timelines")


def test_a_figure_that_is_zero_in_all_cells_is_not_plotted(tmp_path: Path) -> None:
    results = []  # of loads to the CPU, whose models a use then moves to a GPU
    for strategy in ("mmap_assign", "streaming"):
        one = make_result(make_cell(strategy=strategy, use="to-device"))
        results.append(replace(one, peaks=replace(one.peaks, cuda_allocated_bytes=0)))
    words = page(tmp_path, results).words()
    assert "peak RSS, GiB (exact)" in words
    assert "CUDA peak, GiB (exact)" not in words


def test_an_empty_run(tmp_path: Path) -> None:
    found = page(tmp_path, [])
    assert "A run without cells" in found.words()
    assert "No cells were measured." in found.words()
    assert "There are no figures, because the run has no record yet." in found.words()
    assert not found.having("svg")


def test_a_run_whose_samples_are_missing_still_shows_exact_peaks(tmp_path: Path) -> None:
    found = Page(render(tmp_path, notebook_run()))
    assert found.words().count("no samples") == 6
    assert len(found.having("line", **{"class": "peak"})) > 20
    assert not found.having("path", **{"class": "outline"})


def test_sixty_cells_stay_below_two_megabytes(tmp_path: Path) -> None:
    results = [
        make_result(make_cell(name, ram_limit_bytes=n * GIB))
        for n in range(7, 17)
        for name in SCRIPTS
    ]
    for result in results:
        write_samples(tmp_path, result)
    assert len(results) == 60
    assert 200_000 < len(render(tmp_path, results).encode()) < 2_000_000


def test_cells_of_two_machines_are_a_warning(tmp_path: Path) -> None:
    other = make_result(make_cell("baseline"), environment=ENVIRONMENT | {"kernel": "6.1.0"})
    found = page(tmp_path, [make_result(), other, make_skipped()])
    assert (
        "the measurements were made on different machines or with different software: kernel"
        " (6.18.0, 6.1.0). Compare memory figures with care; do not compare times"
    ) in found.words()
    assert len(found.having("div", **{"class": "differs"})) == 1


@pytest.mark.parametrize("results", [mixed_run(), [make_skipped()]])
def test_the_axis_names_no_place_beyond_the_drawing(tmp_path: Path, results: list[Result]) -> None:
    for attributes in page(tmp_path, results).having("rect"):
        left = float(attributes["x"] or 0)
        assert 40 <= left <= left + float(attributes["width"] or 0) <= 457


def test_the_front_is_what_nothing_is_better_than_in_both() -> None:
    points = [(1, 9), (2, 5), (3, 5), (4, 2), (4, 3), (9, 1), (5, 8)]
    assert pareto_front(points) == [(1, 9), (2, 5), (4, 2), (9, 1)]
    assert pareto_front([]) == []


def test_labels_of_near_points_do_not_cover_each_other() -> None:
    labels = place_labels([(100, 100, "streaming"), (104, 102, "mmap_assign")], 500, 300, 13)
    first, second = labels
    assert abs(first.y - second.y) > 13 or first.anchor != second.anchor


def test_an_axis_ends_where_the_drawing_ends() -> None:
    axis = Axis(10.0, 40.0, 440.0)
    assert [axis.at(value) for value in (0, 5, 10, 12)] == [40.0, 240.0, 440.0, 440.0]
    assert axis.ticks() == [(40.0, "0"), (120.0, "2"), (200.0, "4"), (280.0, "6"), (360.0, "8"), (440.0, "10")]  # fmt: skip


def test_a_sweep_has_its_survival_matrix_and_the_reasons(tmp_path: Path) -> None:
    found = Page(render(tmp_path, a_sweep()))
    (killed, *_) = found.having("td", **{"class": "killed number"})
    assert killed["data-tip"] == (
        "baseline, 8 GiB: killed\nkilled by the kernel for lack of memory in phase 'read'"
    )
    (thrashing,) = found.having("td", **{"class": "thrashes number"})
    tip = thrashing["data-tip"] or ""
    assert tip.startswith(
        "mmap_assign, 1 GiB: thrashes\n41.0 s, 8.2x the time without a limit: 5.00 s"
    )
    assert found.having(
        "div", **{"aria-label": "Survival under each limit; arrow keys move between fields"}
    )
    assert "≈ 41.0 s thrashes" in found.words()


def test_a_search_has_its_floors(tmp_path: Path) -> None:
    words = Page(render(tmp_path, a_search())).words()
    assert "RAM floors" in words
    assert "mmap_assign needs the least RAM: 256 MiB" in words
    assert "streaming 4.199 1.05" in words
    assert "Survival" not in words


@pytest.mark.parametrize("results", [notebook_run(), saving_run(), mixed_run(), [make_ran()]])
def test_every_column_is_explained(results: list[Result]) -> None:
    rows = series(results)
    explained = {name: meaning for name, _, meaning, _ in figures(rows)}
    assert all(explained.values())
    assert {column.heading for column in figures_of(rows)} <= explained.keys()
