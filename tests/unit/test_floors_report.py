"""The floors as a user reads them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from factories import ENVIRONMENT, make_cell
from rich.console import Console

from pages.run_tables import markdown_agreement
from weighin.report import html_page
from weighin.report.findings import markdown
from weighin.report.findings import terminal as findings_terminal
from weighin.report.floors import found, has_data
from weighin.result import (
    SCHEMA,
    Cost,
    Faults,
    Memory,
    Outcome,
    Peaks,
    Pressure,
    Result,
    Stopped,
)
from weighin.units import GIB, MIB

SECOND = 1_000_000_000


def lived(strategy: str, mib: int | None, seconds: float | None, repeat: int = 0) -> Result:
    """A cell that was ready after so many seconds; killed where that is None."""
    cell = make_cell(strategy, ram_limit_bytes=None if mib is None else mib * MIB, repeat=repeat)
    is_slow = seconds is not None and seconds > 5
    return Result(
        SCHEMA,
        cell,
        Outcome.OOM_KILLED if seconds is None else Outcome.OK,
        environment=ENVIRONMENT,
        model_bytes=4 * GIB,
        baseline=Memory(230 * MIB, 144 * MIB, 86 * MIB, 0),
        peaks=Peaks(rss_bytes=GIB, anon_sampled_bytes=GIB),
        ready_ns=None if seconds is None else round(seconds * SECOND),
        faults=Faults(1, 9, 3 * 1024**2 if is_slow else 0),
        pressure=Pressure(SECOND if is_slow else 0, 0),
        cost=Cost(SECOND),
    )


def late(result: Result) -> Result:
    message = "still running after 300 s, in phase 'touch'"
    stopped = Stopped(300 * SECOND, timeout_s=300.0)
    return replace(result, outcome=Outcome.TIMEOUT, message=message, oom_kills=0, stopped=stopped)


def a_search() -> list[Result]:
    return [
        lived("streaming", None, 2), lived("streaming", 4300, 2.5), lived("streaming", 4272, None),
        lived("streaming", 4300, 2.25, 1), lived("streaming", 4300, 3, 2), lived("streaming", 4730, 2),
        lived("mmap_assign", None, 2), lived("mmap_assign", 256, 17), late(lived("mmap_assign", 248, None)),
        lived("mmap_assign", 256, 19, 1), lived("mmap_assign", 256, 18, 2), lived("mmap_assign", 282, 3),
        replace(lived("broken", None, None), message="no"),
    ]  # fmt: skip


def terminal(results: list[Result]) -> list[str]:
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(findings_terminal(found(results)))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_floors_in_a_terminal_of_80_columns() -> None:
    assert terminal(a_search()) == [
        "",
        "                                                         at",
        "                 RAM             above        one       the        at      no",
        "               floor    floor   import       step     floor      1.1x   limit",
        " strategy        GiB  x model  x model      below     ready     ready   ready",
        " ────────────────────────────────────────────────────────────────────────────",
        " streaming     4.199     1.05     1.01    28 MiB:    2.50 s    2.00 s  2.00 s",
        "                                           killed      1.2x      1.0x",
        "                                                   survives  survives",
        " mmap_assign   0.250     0.06     0.03     8 MiB:    18.0 s    3.00 s  2.00 s",
        "              (ends)                    timed out      9.0x      1.5x",
        "                                            after  thrashes  survives",
        "                                            300 s",
        " broken            -        -        -          -         -         -       -",
        "",
        "streaming at the floor survives: 2.50 s, 1.2x the time without a limit: 2.00 s;",
        "0 B read again (0.00x the model); 9 major faults; waited for memory 0% of the",
        "load (all tasks at once 0%)",
        "streaming at 1.1x survives: 2.00 s, 1.0x the time without a limit: 2.00 s; 0 B",
        "read again (0.00x the model); 9 major faults; waited for memory 0% of the load",
        "(all tasks at once 0%)",
        "mmap_assign at the floor thrashes: 18.0 s, 9.0x the time without a limit: 2.00",
        "s; 12.00 GiB read again (3.00x the model); 9 major faults; waited for memory 6%",
        "of the load (all tasks at once 0%)",
        "mmap_assign at 1.1x survives: 3.00 s, 1.5x the time without a limit: 2.00 s; 0 B",
        "read again (0.00x the model); 9 major faults; waited for memory 0% of the load",
        "(all tasks at once 0%)",
        "broken: no floor: oom_killed without a limit: no",
        "RAM floor: the smallest RAM limit, with swap off, under which three of three",
        "loads survived and all weights were right. Under the limit one step below, the",
        "load was killed for lack of memory, thrashed or timed out. x: the time of the",
        "load as a multiple of its time without a limit.",
        "(ends): the smallest RAM limit under which three of three loads ended, although",
        "they thrashed. Run weighin floor without --thrashing to find the larger limit",
        "under which no load thrashes.",
        "above import: (floor - anonymous memory after `import torch`) / the model's",
        "size.",
        "ready: time until every byte was read once, in the median cell. The search ran",
        "13 cells in all.",
        "gpt2-xl (4.000 GiB) · device cpu · format pt · float32 · cold page cache ·",
        "isolation docker · testbench · Example CPU · Linux 6.18.0 · cgroup v2 · torch",
        "2.13.0 · measured on an unknown day with weighin commit unknown",
    ]


def test_floors_of_a_model_smaller_than_the_import_have_no_column_above_import() -> None:
    small = [replace(result, model_bytes=MIB) for result in a_search()]
    shown = terminal(small)
    assert shown[4].split() == ["strategy", "GiB", "x", "model", "below", "ready", "ready", "ready"]
    assert markdown(found(small)).startswith(
        "| strategy | RAM floor GiB | floor x model | one step below |"
    )
    lines = " ".join(shown)
    assert (
        "Left out: above import x model, because the model is smaller than import torch." in lines
    )


def test_the_floors_as_markdown() -> None:
    assert markdown(found(a_search()), reasons=False).splitlines() == [
        "| strategy | RAM floor GiB | floor x model | above import x model | one step below | at the floor ready | at 1.1x ready | no limit ready |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| streaming | 4.199 | 1.05 | 1.01 | 28 MiB: killed | 2.50 s 1.2x survives | 2.00 s 1.0x survives | 2.00 s |",
        "| mmap_assign | 0.250 (ends) | 0.06 | 0.03 | 8 MiB: timed out after 300 s | 18.0 s 9.0x thrashes | 3.00 s 1.5x survives | 2.00 s |",
        "| broken | - | - | - | - | - | - | - |",
        "",
        "gpt2-xl (4.000 GiB) · device cpu · format pt · float32 · cold page cache · isolation docker · testbench · Example CPU · Linux 6.18.0 · cgroup v2 · torch 2.13.0 · measured on an unknown day with weighin commit unknown",
    ]


def test_searches_side_by_side_say_how_far_they_are_apart() -> None:
    again = [lived("streaming", mib, s, n) for mib, s, n in (
        (None, 2, 0), (4328, 2, 0), (4300, None, 0), (4328, 2, 1), (4328, 2, 2),
    )]  # fmt: skip
    assert markdown_agreement({"docker": a_search(), "cgroup": again}).splitlines() == [
        "| floor, MiB | docker | cgroup | difference, MiB |",
        "| --- | ---: | ---: | ---: |",
        "| streaming | 4300 | 4328 | 28 (0.7%) |",
        "| mmap_assign | 256 (ends) (timed out after 300 s) | - | - |",
        "| broken | - | - | - |",
        "",
        "One step below its floor, a load was killed for lack of memory, unless the table names another outcome.",
        "",
        "gpt2-xl (4.000 GiB) · device cpu · format pt · float32 · cold page cache · isolation docker · testbench · Example CPU · Linux 6.18.0 · cgroup v2 · torch 2.13.0 · measured on an unknown day with weighin commit unknown",
    ]


def test_the_floors_in_report_html_say_how_they_failed_below() -> None:
    page = html_page.render(Path("nowhere"), a_search())
    assert "one step below" in page
    assert "28 MiB: killed" in page
    assert "8 MiB: timed out after 300 s" in page


def test_floors_are_shown_where_one_was_found() -> None:
    assert has_data(a_search())
    assert not has_data(a_search()[:3])
