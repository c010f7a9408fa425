"""Figures: what is drawn equals the data, and odd runs are drawn too."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import (
    LIMIT,
    MODEL_BYTES,
    SCRIPTS,
    make_cell,
    make_result,
    make_skipped,
    mixed_run,
    notebook_run,
    write_samples,
)

from weighin.errors import RecordError
from weighin.records import run_folder
from weighin.report import style
from weighin.report.peaks_plot import draw_peaks
from weighin.report.timeline import draw_timeline
from weighin.report.writing import write_report
from weighin.result import Outcome, Result

GIB = 1024**3


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def lines(axes: Any) -> list[Any]:
    """Return the lines of ``axes``: matplotlib's types do not tell that their data are arrays."""
    return list(axes.lines)


def gib(sizes: Iterable[int | None]) -> list[float]:
    return [(size or 0) / GIB for size in sizes]


def widths(axes: Any, part: str) -> list[float]:
    return [bar[0].get_width() for bar in axes.containers if bar.get_label() == part]


def sampled(run: Path, results: Sequence[Result]) -> Path:
    for result in results:
        write_samples(run, result)
    return run


def test_bars_and_markers_equal_the_data() -> None:
    results = notebook_run()
    (axes,) = draw_peaks(results).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(SCRIPTS)
    peaks = [result.peaks for result in results]
    assert widths(axes, "anonymous") == pytest.approx(gib(p.anon_sampled_bytes for p in peaks))
    assert widths(axes, "file") == pytest.approx(gib(p.file_sampled_bytes for p in peaks))
    marks = [line.get_xdata()[0] for line in lines(axes) if line.get_label() == "peak RSS"]
    assert marks == pytest.approx(gib(p.rss_bytes for p in peaks))


def test_reference_lines_and_words_name_their_figures() -> None:
    figure = draw_peaks(notebook_run())
    (axes,) = figure.axes
    uprights = {line.get_xdata()[0] for line in lines(axes) if len(set(line.get_xdata())) == 1}
    assert {MODEL_BYTES / GIB, LIMIT / GIB} <= uprights
    assert {"model 6.290 GiB", "RAM limit 8 GiB", "6.82"} <= set(texts(axes))
    assert "7.98  oom_killed in apply" in texts(axes)
    assert axes.get_xlabel() == "memory of the loading process, GiB"
    words = " ".join(text.get_text() for text in figure.texts)
    assert "Peak memory while loading gpt2-xl (6.290 GiB), RAM limit 8 GiB" in words
    assert "cold page cache · isolation docker" in words


def test_killed_cells_are_hatched() -> None:
    (axes,) = draw_peaks(notebook_run()).axes
    bars = [bar[0] for bar in axes.containers if bar.get_label() == "anonymous"]
    assert [bool(bar.get_hatch()) for bar in bars] == [True] * 3 + [False] * 3


def test_a_limit_far_away_does_not_squeeze_the_bars() -> None:
    (axes,) = draw_peaks([make_result(make_cell(ram_limit_bytes=512 * GIB))]).axes
    assert axes.get_xlim()[1] < 10
    assert "RAM limit 512 GiB →" in texts(axes)


def test_each_limit_and_device_is_a_panel() -> None:
    cuda = make_result(make_cell(device="cuda"))
    cuda = replace(cuda, peaks=replace(cuda.peaks, cuda_allocated_bytes=GIB))
    figure = draw_peaks([make_result(), make_result(make_cell(ram_limit_bytes=None)), cuda])
    assert titles(figure) == [
        "device cpu · RAM limit 8 GiB", "device cpu · no RAM limit", "device cuda · RAM limit 8 GiB",
    ]  # fmt: skip
    marks = [
        line.get_xdata()[0] for line in lines(figure.axes[2]) if line.get_label() == "CUDA peak"
    ]
    assert marks == [1.0]


def test_a_long_sweep_says_how_much_is_not_drawn(tmp_path: Path) -> None:
    results = [make_result(make_cell(ram_limit_bytes=n * GIB)) for n in range(8, 24)]
    for figure in (draw_peaks(results), draw_timeline(tmp_path, results)):
        assert len(figure.axes) == 12
        assert any("4 more panels are not drawn" in text.get_text() for text in figure.texts)


def test_a_strategy_keeps_its_colour() -> None:
    assert style.colour("mmap_assign") == "#0072B2"
    assert style.colour("somebody_elses") == style.colour("somebody_elses")
    assert len({style.colour(name) for name in SCRIPTS}) == len(SCRIPTS)


def test_the_timeline_stacks_the_samples_and_names_the_phases(tmp_path: Path) -> None:
    results = notebook_run()
    figure = draw_timeline(sampled(tmp_path, results), results)
    assert titles(figure) == [f"{r.cell.strategy}: {r.outcome}" for r in results]
    axes = figure.axes[3]
    assert {"import", "touch", "forward"} <= set(texts(axes))
    assert "short phases: build 100 ms, map 30.0 ms, assign 10.0 ms, buffers 300 ms" in texts(axes)
    last_but_one, last = lines(axes)[-2:]
    rss = last if len(last.get_xdata()) > 2 else last_but_one
    assert max(rss.get_ydata()) == pytest.approx(0.5 + 6.42)
    assert figure.axes[0].get_ylabel() == "RSS, GiB"
    assert figure.axes[5].get_xlabel() == "time since the worker started, s"


def test_the_kill_is_marked_where_the_samples_end(tmp_path: Path) -> None:
    result = make_result(make_cell("baseline"))
    (axes,) = draw_timeline(sampled(tmp_path, [result]), [result]).axes
    (mark,) = [line for line in lines(axes) if line.get_label() == "cut off"]
    assert mark.get_ydata()[0] == pytest.approx(8, abs=0.05)
    assert {"oom_killed in read", "read"} <= set(texts(axes))


def test_a_spike_of_one_sample_survives_thinning(tmp_path: Path) -> None:
    script = [
        ("import", 1.0, 0.1, 0.1),
        ("read", 99.0, 1.0, 0.1),
        ("spike", 0.02, 5.0, 0.1),
        ("apply", 99.0, 1.0, 0.1),
    ]
    result = make_result(script=script)
    write_samples(tmp_path, result, script)
    (axes,) = draw_timeline(tmp_path, [result]).axes
    assert max(max(line.get_ydata()) for line in lines(axes) if len(line.get_ydata()) > 9) > 5


def test_a_timeout_does_not_squeeze_the_others(tmp_path: Path) -> None:
    script = [("import", 1.0, 0.1, 0.1), ("thrash", 600.0, 1.0, 0.1)]
    slow = make_result(make_cell("slow"), script, Outcome.TIMEOUT, last_phase="thrash")
    write_samples(tmp_path, slow, script)
    figure = draw_timeline(tmp_path, [make_result(), slow])
    assert figure.axes[0].get_xlim()[1] < 20
    assert "timeout at 601 s →" in texts(figure.axes[1])


def test_a_panel_without_samples_says_so(tmp_path: Path) -> None:
    figure = draw_timeline(tmp_path, [make_result(), make_skipped()])
    assert "no samples" in texts(figure.axes[0])
    assert "not run" in texts(figure.axes[1])


@pytest.mark.parametrize("results", [mixed_run(), [make_result()], [make_skipped()], []])
def test_any_run_can_be_drawn(tmp_path: Path, results: list[Result]) -> None:
    for figure in (draw_peaks(results), draw_timeline(tmp_path, results)):
        file = io.BytesIO()
        figure.set_dpi(50)
        figure.savefig(file, format="png")
        assert file.getvalue().startswith(b"\x89PNG")


def test_dollars_in_names_are_not_mathematics(tmp_path: Path) -> None:
    result = make_result(make_cell("$a_b$"), outcome=Outcome.STRATEGY_FAILED, last_phase="$\\x$")
    draw_peaks([result]).savefig(io.BytesIO(), dpi=40)
    draw_timeline(tmp_path, [result]).savefig(io.BytesIO(), dpi=40)


def test_the_report_is_written_into_the_run(tmp_path: Path) -> None:
    run_folder.append(tmp_path, make_result())
    sampled(tmp_path, [make_result()])
    paths = write_report(tmp_path)
    assert [path.name for path in paths] == [
        "report.md", "report.html", "summary.csv", "peaks.png", "timeline.png",
    ]  # fmt: skip
    assert all(path.stat().st_size for path in paths)
    assert "![peaks](peaks.png)" in paths[0].read_text()


def test_only_what_is_asked_for_is_written(tmp_path: Path) -> None:
    run_folder.append(tmp_path, make_result())
    wanted = ["md", "svg", "bmf", "gha", "openmetrics", "parquet"]
    assert [path.name for path in write_report(tmp_path, wanted)] == [
        "report.md", "peaks.svg", "timeline.svg", "bmf.json", "gha.json", "openmetrics.txt",
        "cells.parquet",
    ]  # fmt: skip
    assert "![peaks](peaks.svg)" in (tmp_path / "report.md").read_text()
    write_report(tmp_path, ["md"])
    assert "![" not in (tmp_path / "report.md").read_text()


def test_an_svg_is_the_same_each_time_and_holds_its_text_as_text(tmp_path: Path) -> None:
    run_folder.append(tmp_path, make_result())
    (first, _) = write_report(tmp_path, ["svg"])
    drawn = first.read_bytes()
    write_report(tmp_path, ["svg"])
    assert first.read_bytes() == drawn
    assert b">mmap_assign</text>" in drawn


def test_a_report_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        write_report(tmp_path)


def gpu_lines(axes: Any) -> list[Any]:
    return [line for line in lines(axes) if line.get_label() == "GPU"]


def test_the_samples_show_the_gpu(tmp_path: Path) -> None:
    result = make_result(make_cell(device="cuda"))
    path = write_samples(tmp_path, result)
    head, *rows = path.read_text().splitlines()
    place = head.split(",").index("cuda_allocated_bytes")
    lines = [row.split(",") for row in rows]
    for row in lines:
        row[place] = str(2 * GIB)
    path.write_text("\n".join([head, *map(",".join, lines)]) + "\n")
    figure = draw_timeline(tmp_path, [result])
    (line,) = gpu_lines(figure.axes[0])
    assert set(line.get_ydata()) == {2.0}
    assert any("On the GPU: allocated bytes, sampled." in one.get_text() for one in figure.texts)


def test_a_cell_without_a_gpu_has_no_such_line(tmp_path: Path) -> None:
    result = make_result()
    assert gpu_lines(draw_timeline(sampled(tmp_path, [result]), [result]).axes[0]) == []
