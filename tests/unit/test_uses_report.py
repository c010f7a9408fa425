"""What the use of a model costs after its load, as a reader of a report, a page or a gate sees it."""

from dataclasses import replace
from typing import Any

from factories import ENVIRONMENT, make_cell

from weighin.records.floor import floors, next_cell
from weighin.records.run_folder import Records
from weighin.records.series import Measured, name_of, summarise
from weighin.records.verdict import used_ns
from weighin.result import SCHEMA, Cost, Memory, Outcome, Peaks, Phase, Result, Use
from weighin.show.findings import floor_label, uses
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


def test_the_gate_compares_the_figures_of_uses_and_names_their_phase() -> None:
    result = used("mmap_assign", "adamw", 0.0, 4.25, 4.03)
    found = summarise([Records([result])])[name_of(result.cell)]
    assert found.figures["use_anon"].median == anonymous(4.03).anon_bytes
    assert found.figures["use_peak_rss"].median == anonymous(4.25).rss_bytes + MIB
    assert found.figures["use"].median == 2 * SECOND
    assert "use: adamw" in found.phases
    forward = used("mmap_assign", "forward", 0.0, 0.02, 0.01)
    found = summarise([Records([forward])])[name_of(forward.cell)]
    assert not {"use", "use_anon", "use_peak_rss"} & found.figures.keys()
    assert "forward" not in found.phases


def test_the_time_and_the_floor_of_a_cell_include_its_use() -> None:
    result = used("mmap_assign", "adamw", 0.0, 4.25, 4.03)
    assert used_ns(result) == 4 * SECOND
    searched = floors([result, used("mmap_assign", "write", 0.0, 1.0, 1.0)])
    assert list(map(floor_label(searched), searched)) == [
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


def test_options_with_one_text_have_a_row_each() -> None:
    run = [used("a", use, size, 4.0, 4.0) for size in (1.0, 2.0) for use in ("forward", "adamw")]
    for one, x in zip(run, ("1", "1", 1, 1), strict=True):
        one.cell.options["x"] = x
    (table,) = uses(Measured(run))
    assert [row[1] for row in table.rows] == ["1.00", "2.00"]
