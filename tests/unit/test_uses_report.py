"""What the use of a model costs after its load, as a reader of a report, a page or a gate sees it."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import ENVIRONMENT, make_cell
from rich.console import Console

from pages.run_tables import markdown_trained
from pages.tables import fill
from weighin.records import run_folder
from weighin.records.floor import floors, next_cell
from weighin.records.series import SeriesRun, name_of, summarise
from weighin.records.verdict import used_ns
from weighin.report import after_load, captions, exports
from weighin.report.findings import markdown
from weighin.report.floors import label
from weighin.report.rows import series
from weighin.report.sections import terminal_table
from weighin.report.tables import markdown_table
from weighin.report.writing import write_report
from weighin.result import SCHEMA, Cost, Memory, Outcome, Peaks, Phase, Result, Use
from weighin.units import GIB, MIB

SECOND = 1_000_000_000
MODEL = 1000 * MIB
IMPORTED = 200 * MIB


def anonymous(multiple: float) -> Memory:
    size = IMPORTED + round(multiple * MODEL)
    return Memory(size + 100 * MIB, size, 100 * MIB, 0)


def used(
    strategy: str, use: str, loaded: float, most: float, after: float, **changes: Any
) -> Result:
    """A load whose use takes 2 s; its memory is given in multiples of the model, above the import."""
    cell = make_cell(strategy, ram_limit_bytes=None)
    cell = replace(cell, use="" if use == "forward" else use, passes=int(use == "forward"))
    name = use if use == "forward" else f"use: {use}"
    peak = anonymous(most).rss_bytes + MIB
    phases = (
        Phase("touch", SECOND, 2 * SECOND, anonymous(loaded).rss_bytes, anonymous(loaded), 1, 1),
        Phase(name, 3 * SECOND, 5 * SECOND, peak, anonymous(after), 1, 1, peak_cgroup_bytes=peak),
    )
    result = Result(
        SCHEMA,
        cell,
        Outcome.OK,
        model_bytes=MODEL,
        baseline=anonymous(0.0),
        peaks=Peaks(rss_bytes=GIB, anon_sampled_bytes=anonymous(loaded).anon_bytes),
        phases=phases,
        load_ns=SECOND,
        ready_ns=2 * SECOND,
        cost=Cost(wall_ns=9 * SECOND, first_use_ns=2 * SECOND),
        environment=ENVIRONMENT,
        use=Use(anonymous(most).anon_bytes),
    )
    return replace(result, **changes)


def a_run() -> list[Result]:
    forked = replace(used("mmap_assign", "fork", 0.0, 0.0, 0.0), use=Use(IMPORTED, "", (MODEL, MODEL + 10 * MIB)))  # fmt: skip
    killed = replace(used("baseline", "adamw", 1.0, 4.0, 4.0), outcome=Outcome.OOM_KILLED)
    return [
        used("mmap_assign", "forward", 0.0, 0.02, 0.01),
        used("mmap_assign", "write", 0.0, 1.0, 1.0),
        used("mmap_assign", "adamw", 0.0, 4.25, 4.03),
        forked,
        used("baseline", "write", 1.0, 1.0, 1.0),
        killed,
    ]


def test_each_strategy_has_a_row_and_each_use_a_column() -> None:
    lines = markdown(after_load.found(a_run())).splitlines()
    assert lines[:4] == [
        "| strategy | loaded | forward | write | adamw | fork |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| mmap_assign | 0.00 | 0.02 0.01 | 1.00 1.00 | 4.25 4.03 | +1.01 |",
        "| baseline | 1.00 | - | 1.00 1.00 | oom_killed | - |",
    ]
    text = " ".join(lines)
    assert "the largest during the use (sampled), and the one at the end of the use (exact)" in text
    assert "fork: the private memory that each of two forked processes adds" in text


def test_a_terminal_and_a_page_show_the_same_table(tmp_path: Path) -> None:
    for result in a_run():
        run_folder.append(tmp_path, result)
    shown = io.StringIO()
    Console(file=shown, width=200).print(terminal_table(a_run()))
    write_report(tmp_path)
    texts = [(tmp_path / name).read_text() for name in ("report.md", "report.html")]
    for text in (shown.getvalue(), *texts):
        assert "4.25 4.03" in text


def test_one_line_says_what_a_training_step_makes_of_each_strategy() -> None:
    run = [
        used("mmap_assign", "adamw", 0.0, 4.25, 4.03),
        used("baseline", "adamw", 2.0, 4.25, 4.03),
    ]
    first = markdown_trained(run).splitlines()[0]
    assert first.endswith(": mmap_assign 0.00 → 4.25; baseline 2.00 → 4.25")


def test_the_long_table_has_the_figures_of_uses_only_where_there_are_uses() -> None:
    heads = markdown_table(a_run()).splitlines()[0]
    assert "| use | " in heads and "| most in use x model | after use x model |" in heads
    alone = [used("mmap_assign", "forward", 0.0, 0.02, 0.01)]
    assert "use" not in markdown_table(alone).splitlines()[0]
    assert "use" not in captions.shared(series(alone), alone)
    row = next(row for row in series(a_run()) if row["use"] == "adamw")
    assert (row["use_s"], round(row["use_most_per_model"], 2)) == (2.0, 4.25)


def test_the_gate_compares_the_figures_of_uses_and_names_their_phase() -> None:
    result = used("mmap_assign", "adamw", 0.0, 4.25, 4.03)
    found = summarise([SeriesRun([result])])[name_of(result.cell)]
    assert found.figures["use_anon"].median == anonymous(4.03).anon_bytes
    assert found.figures["use_peak_rss"].median == anonymous(4.25).rss_bytes + MIB
    assert found.figures["use"].median == 2 * SECOND
    assert "use: adamw" in found.phases
    forward = used("mmap_assign", "forward", 0.0, 0.02, 0.01)
    found = summarise([SeriesRun([forward])])[name_of(forward.cell)]
    assert not {"use", "use_anon", "use_peak_rss"} & found.figures.keys()
    assert "forward" not in found.phases


def test_the_time_and_the_floor_of_a_cell_include_its_use() -> None:
    result = used("mmap_assign", "adamw", 0.0, 4.25, 4.03)
    assert used_ns(result) == 4 * SECOND
    searched = floors([result, used("mmap_assign", "write", 0.0, 1.0, 1.0)])
    assert [label(floor, searched) for floor in searched] == [
        "mmap_assign adamw",
        "mmap_assign write",
    ]


def test_a_search_for_the_floor_of_a_use_begins_at_what_the_use_needs() -> None:
    result = used("mmap_assign", "adamw", 0.0, 4.25, 4.03)
    first = next_cell(result.cell, [result], 0.01, 64 * GIB)
    assert first and first.ram_limit_bytes
    assert (
        0 <= first.ram_limit_bytes - anonymous(4.25).anon_bytes < 0.1 * anonymous(4.25).anon_bytes
    )


def test_exports_name_the_use() -> None:
    text = exports.github_action_benchmark([used("mmap_assign", "adamw", 0.0, 4.25, 4.03)])
    assert "use=adamw use_anon" in text


@pytest.mark.parametrize("part", ["uses", "trained"])
def test_a_block_of_a_run_that_nobody_measured_says_so(tmp_path: Path, part: str) -> None:
    (published := tmp_path / "results/published").mkdir(parents=True)
    (published / "runs.yaml").write_text("x: bench gpt2-tiny\n")
    page = f"<!-- results/published/x {part} -->\nold\n<!-- end -->"
    assert fill(page, tmp_path).splitlines()[1] == 'Not measured yet: `make publish ARGS="x"`.'
    for result in a_run():
        run_folder.append(published / "x", result)
    assert "4.25" in fill(page, tmp_path)


def test_the_gpu_memory_of_a_use_has_a_column_where_there_is_a_gpu() -> None:
    moved = used("streaming", "to-device", 1.0, 1.0, 0.0)
    *load, use = moved.phases
    on_gpu = replace(moved, phases=(*load, replace(use, peak_cuda_allocated_bytes=GIB)))
    heading, _, row = markdown_table([on_gpu]).splitlines()[:3]
    cells = dict(zip(heading.split(" | "), row.split(" | "), strict=True))
    assert cells["CUDA allocated in use GiB |"] == "1.000 |"
    assert "in use GiB" not in markdown_table([moved])
