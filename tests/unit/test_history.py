"""A metric over runs: steps where there are some, none where there are none, and what moved there."""

import io
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from factories import ENVIRONMENT, make_cell, make_result
from rich.console import Console

from weighin import install
from weighin.cli import app
from weighin.errors import ConfigError, RecordError, UnknownName
from weighin.records import run_folder
from weighin.report import history, history_plot
from weighin.report.change_points import find_steps
from weighin.result import Outcome, Result
from weighin.units import GIB, MIB

COMMITS = ["aaaaaaaaaaaa", "bbbbbbbbbbbb"]


def measured(day: int, peak: int, strategy: str = "streaming", **environment: Any) -> Result:
    result = make_result(
        make_cell(strategy, format="safetensors"),
        started_at=f"2026-11-{day:02}T10:00:00.000+00:00",
        environment=ENVIRONMENT | environment,
    )
    return replace(result, peaks=replace(result.peaks, rss_bytes=peak))


def write(folder: Path, results: list[Result]) -> None:
    for result in results:
        run_folder.append(folder / f"run-{result.started_at[:10]}", result)


def said(found: history.History) -> str:
    console = Console(width=160, file=io.StringIO(), color_system=None)
    console.print(history.terminal_table(found))
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_a_step_is_found_and_its_commit_named(tmp_path: Path) -> None:
    peaks = [GIB, GIB, GIB, GIB + 60 * MIB, GIB + 60 * MIB]
    write(tmp_path, [
        measured(day, peak, git_commit=COMMITS[day > 3]) for day, peak in enumerate(peaks, start=1)
    ])  # fmt: skip
    found = history.read(tmp_path, "peak_rss")
    (line,) = found.lines
    assert [(step.index, step.now - step.was) for step in line.steps] == [(3, 60 * MIB)]
    text = said(found)
    assert (
        "gpt2-xl streaming safetensors float32 cpu cold docker ram=8GiB: +60.0 MiB (+5.9 %) since "
        "run-2026-11-04 (1.000 GiB -> 1.059 GiB), commit aaaaaaaaa -> bbbbbbbbb"
    ) in text
    assert "peak_rss over 5 runs" in text


def test_a_step_in_the_newest_run_is_found_at_once(tmp_path: Path) -> None:
    write(tmp_path, [measured(day, GIB + 60 * MIB * (day == 6)) for day in range(1, 7)])
    (line,) = history.read(tmp_path, "peak_rss").lines
    assert [step.index for step in line.steps] == [5]


def test_noise_within_the_gates_tolerance_is_no_step(tmp_path: Path) -> None:
    noise = random.Random(7)
    write(tmp_path, [measured(day, GIB + noise.randrange(4 * MIB)) for day in range(1, 29)])
    found = history.read(tmp_path, "peak_rss")
    assert found.lines[0].steps == []
    assert "no step: no series changed its level" in said(found)


@pytest.mark.parametrize("seed", range(20))
def test_noisy_figures_have_no_steps_and_a_real_one_is_where_it_was_put(seed: int) -> None:
    noise = random.Random(seed)
    level = [round(noise.gauss(3_000_000_000, 250_000_000)) for _ in range(40)]
    allowance = 1_500_000_000
    assert find_steps(level, allowance, 2) == []
    stepped = [value + (3_000_000_000 if n >= 25 else 0) for n, value in enumerate(level)]
    assert find_steps(stepped, allowance, 2) == [25]


@pytest.mark.parametrize("figures", [[], [1], [1, 1], [5, 5, 5]])
def test_few_or_equal_figures_have_no_step(figures: list[int]) -> None:
    assert find_steps(figures, 10, 1) == []
    assert find_steps(figures, 10, 2) == []


def test_what_moved_with_a_step_is_said(tmp_path: Path) -> None:
    write(tmp_path, [
        measured(1, GIB), measured(2, GIB), measured(3, 2 * GIB, kernel="7.0", torch="2.14.0"),
    ])  # fmt: skip
    text = said(history.read(tmp_path, "peak_rss"))
    assert (
        "machine or software changed since run-2026-11-03: kernel: 6.18.0 -> 7.0; torch: 2.13.0 -> 2.14.0"
        in text
    )
    assert "; also changed: kernel: 6.18.0 -> 7.0; torch: 2.13.0 -> 2.14.0" in text


def test_what_an_older_record_does_not_say_is_no_change(tmp_path: Path) -> None:
    write(tmp_path, [measured(1, GIB), measured(2, GIB, weighin="0.1.0", git_commit="a" * 40)])
    assert "machine or software changed" not in said(history.read(tmp_path, "peak_rss"))


def test_without_ruptures_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [measured(day, GIB) for day in (1, 2)])
    monkeypatch.setitem(sys.modules, "ruptures", None)
    with pytest.raises(ConfigError) as caught:
        history.read(tmp_path, "peak_rss")
    assert str(caught.value) == (
        f"history needs the Python package ruptures, which is not installed\n{install.command('history')}"
    )


def test_an_outcome_that_changes_is_told(tmp_path: Path) -> None:
    bad = replace(measured(3, GIB), outcome=Outcome.OOM_KILLED)
    write(tmp_path, [measured(1, GIB), measured(2, GIB), bad])
    text = said(history.read(tmp_path, "peak_rss"))
    assert "ok -> oom_killed since run-2026-11-03" in text


def test_runs_that_cannot_be_read_are_left_out_with_a_warning(tmp_path: Path) -> None:
    write(tmp_path, [measured(1, GIB), measured(2, GIB), measured(3, GIB)])
    newer = tmp_path / "run-2026-11-02" / run_folder.RECORDS
    newer.write_text(json.dumps({"schema": 99}) + "\n")
    with (tmp_path / "run-2026-11-03" / run_folder.RECORDS).open("a") as file:
        file.write('{"schema": 1, "cell')
    found = history.read(tmp_path, "peak_rss")
    assert [moment.name for moment in found.moments] == ["run-2026-11-01", "run-2026-11-03"]
    first, second = found.warnings
    assert first == (
        f"{newer}, line 1: written by a newer weighin (schema 99; this version reads up to 1):"
        " this line is left out"
    )
    assert "line 2 is incomplete" in second


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no run with a record"):
        history.read(tmp_path, "peak_rss")
    with pytest.raises(ConfigError, match="is not a folder"):
        history.read(tmp_path / "gone", "peak_rss")
    write(tmp_path, [measured(1, GIB)])
    with pytest.raises(UnknownName, match="no metric is called 'peak_rsss'"):
        history.read(tmp_path, "peak_rsss")
    with pytest.raises(
        ConfigError, match=r"no series in the runs of .* has 'baseline' in its name"
    ):
        history.read(tmp_path, "peak_rss", ["baseline"])


def test_published_runs_are_left_out_unless_their_folder_is_named(tmp_path: Path) -> None:
    published = tmp_path / "published"
    write(published, [measured(1, GIB), measured(2, GIB)])
    note = f"the 2 runs in {published} are left out; to see these runs: weighin history {published}"
    with pytest.raises(ConfigError) as caught:
        history.read(tmp_path, "peak_rss")
    assert caught.value.message == f"{tmp_path} contains no run with a record; {note}"
    write(tmp_path, [measured(3, GIB)])
    found = history.read(tmp_path, "peak_rss")
    assert [moment.name for moment in found.moments] == ["run-2026-11-03"]
    assert found.warnings == [note]
    named = history.read(published, "peak_rss")
    assert [moment.name for moment in named.moments] == ["run-2026-11-01", "run-2026-11-02"]
    assert named.warnings == []


def test_a_picture_is_drawn_only_where_out_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "runs", [measured(1, GIB)])
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    shown = CliRunner().invoke(app.app, ["history", "runs"])
    assert (shown.exit_code, sorted(tmp_path.rglob("*"))) == (0, before)
    drawn = CliRunner().invoke(app.app, ["history", "runs", "--out", "peaks.svg"])
    assert drawn.stdout.splitlines()[-1] == "peaks.svg"
    assert {*tmp_path.rglob("*")} - {*before} == {tmp_path / "peaks.svg"}


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_it_is_drawn(tmp_path: Path, kind: str) -> None:
    many = [measured(day, GIB * (1 + (day > 3)), name) for day in range(1, 6) for name in ("streaming", "$x$")]  # fmt: skip
    many.append(replace(measured(6, GIB), outcome=Outcome.OOM_KILLED))
    write(tmp_path, many)
    found = history.read(tmp_path, "peak_rss")
    path = history_plot.draw(found, tmp_path / f"out.{kind}")
    start = path.read_bytes()[:300]
    assert start.startswith(b"\x89PNG") if kind == "png" else b"<svg" in path.read_bytes()[:2000]
    if kind == "svg":
        text = path.read_text()
        assert "▲ +100.0%" in text
        assert "2026-11-01" in text
        assert "peak_rss over 6 runs" in text


def test_a_drawing_of_another_kind_or_place_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, [measured(1, GIB)])
    found = history.read(tmp_path, "peak_rss")
    with pytest.raises(ConfigError, match="cannot draw"):
        history_plot.draw(found, tmp_path / "out.pdf")
    with pytest.raises(RecordError, match="No such file or directory"):
        history_plot.draw(found, tmp_path / "gone" / "out.png")
