"""What a reader sees of a run: in a terminal, on the page, in pictures, in a notebook.

Markdown, CSV, JSON and exports of every published run are kept in tests/contract.
"""

import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from factories import (
    make_cell,
    make_result,
    make_skipped,
    mixed_run,
    notebook_run,
    run_of,
    write_samples,
)
from rich.console import Console
from sweeps import a_sweep

from weighin.records import run_folder, series
from weighin.records.run_folder import Records
from weighin.records.series import Measured
from weighin.result import Outcome, Peaks, Result
from weighin.show import write
from weighin.show.plots import pictures
from weighin.show.report import answer, terminal
from weighin.show.style import svg
from weighin.show.timeline import draw_timelines
from weighin.show.write import results
from weighin.units import GIB

HOSTILE = "<script>alert(1)</script> | `x` \x1b[31m $y$ =SUM(1)"


def shown(found: Measured, width: int = 100) -> str:
    console = Console(width=width, emoji=False)
    with console.capture() as captured:
        console.print(*terminal(found))
    return captured.get()


def test_each_series_is_summarised_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counted = Mock(side_effect=series._summary)
    monkeypatch.setattr(series, "_summary", counted)
    measured = Measured.of(tmp_path, Records(tuple(notebook_run())))
    shown(measured)
    write.write(measured)
    assert counted.call_count == len(measured.by_series) == 6


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_terminal_has_the_answer_last_and_fits(width: int) -> None:
    text = shown(Measured(notebook_run()), width)
    assert all(len(line) <= width for line in text.splitlines())
    last = " ".join(text.splitlines()[-3:])
    assert "The smallest peak RSS is that of" in last
    assert "weighin help figures" in text
    assert "Exact" not in text


def test_a_label_has_the_format_only_where_a_strategy_has_several() -> None:
    cells = [make_cell("a"), make_cell("a", format="dcp"), make_cell("b", format="dcp")]
    text = write.report_md(Measured([make_result(cell) for cell in cells]))
    assert re.findall(r"^\| (\w[\w ]*?) \| ok", text, re.M) == ["a pt", "a dcp", "b"]


@pytest.mark.parametrize("results", [[], [make_skipped()], mixed_run(), a_sweep(), notebook_run()])
def test_any_run_has_a_report_in_every_form(results: list[Result], tmp_path: Path) -> None:
    measured = Measured(results, folder=tmp_path)
    assert shown(measured)
    assert answer(Measured([])) == ["No cells were measured."]
    assert answer(Measured([make_skipped()])) == ["With 8 GiB of RAM, nothing was run."]
    files = write.write(measured, ["md", "html", "csv", "bmf", "gha"])
    assert all(path.stat().st_size for path in files)


def test_a_strangers_texts_are_no_markup(tmp_path: Path) -> None:
    cell = replace(make_cell("x"), options={HOSTILE: HOSTILE})
    bad = make_result(cell, outcome=Outcome.STRATEGY_FAILED, message=HOSTILE, last_phase=HOSTILE)
    measured = Measured([bad, make_result(make_cell("x"))], [HOSTILE], folder=tmp_path)
    html = write.report_html(measured, {name: one.svg for name, one in write.draw(measured)})
    assert "<script>alert" not in html
    assert "\x1b" not in html + write.report_md(measured) + shown(measured)
    assert "<script>" not in write.report_md(measured)
    assert "\n=" not in write.summary_csv(measured)


def test_the_page_needs_no_network_and_runs_only_its_own_script(tmp_path: Path) -> None:
    measured = Measured(notebook_run(), folder=tmp_path)
    html = write.report_html(measured, {name: one.svg for name, one in write.draw(measured)})
    assert "default-src 'none'" in html
    assert not re.findall(r'(?:src|href)="https?:', re.sub(r"<metadata>.*?</metadata>", "", html, flags=re.S))  # fmt: skip
    assert html.count("<script>") == 1
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len({*ids})
    assert "streaming: ok · peak RSS" in html


def test_the_tip_of_a_bar_has_each_size_with_its_range() -> None:
    repeats = [
        make_result(make_cell("streaming", repeat=n), peaks=Peaks(
            rss_bytes=3 * GIB, cgroup_bytes=4 * GIB, anon_sampled_bytes=size,
            file_sampled_bytes=size // 2,
        ))
        for n, size in enumerate((GIB, 2 * GIB))
    ]  # fmt: skip
    text = svg(pictures(Measured(repeats))["peaks"]())
    for said in (
        "streaming: ok · peak RSS 3.000 GiB (exact)",
        "cgroup peak 4.000 GiB (exact, with page cache)",
        "anonymous 1.000 (1.000 to 2.000) GiB (sampled)",
        "file-backed 0.500 (0.500 to 1.000) GiB (sampled)",
    ):
        assert said in text


def test_a_run_of_many_series_has_several_pictures_of_time(tmp_path: Path) -> None:
    many = [make_result(make_cell(f"s{number}")) for number in range(30)]
    measured = Measured(many, folder=tmp_path)
    assert len(list(draw_timelines(measured, 5))) == 3
    (first,) = draw_timelines(measured)
    assert any("18 more panels are not drawn" in text.get_text() for text in first.texts)
    assert [*pictures(measured)] == ["peaks", "time-over-peak"]


def test_a_notebook_gets_the_columns_of_the_summary(tmp_path: Path) -> None:
    run_of(tmp_path, *notebook_run())
    assert results(tmp_path, samples=True).empty
    table = results(tmp_path)
    heads = write.summary_csv(Measured.of(tmp_path, run_folder.read(tmp_path))).splitlines()[0]
    assert ",".join(table.columns) == heads
    assert table["strategy"].tolist()[-1] == "streaming"
    assert str(table["peak_rss_bytes"].dtype) == "Int64"
    write_samples(tmp_path, notebook_run()[-1])
    samples = results(str(tmp_path), samples=True)
    assert {"series", "repeat", "t_ns", "anon_bytes"} <= {*samples.columns}
    assert samples["series"].str.contains("streaming").all()
