"""Survives, thrashes or killed: what decides, while a cell runs and after it, and what is said."""

from dataclasses import replace
from typing import Any

from factories import SCRIPTS, make_cell, make_result
from snapshots import Compare

from weighin.cell import Cell
from weighin.records.verdict import (
    REFAULTS_PER_MODEL,
    SLOWDOWN,
    STALLED_SHARE,
    Reference,
    Verdict,
    judge_all,
    judge_result,
    proof,
    reference_of,
    why_killed,
)
from weighin.result import Cost, Faults, Memory, Outcome, Peaks, Pressure, Ran, Result, Stopped
from weighin.units import GIB, MIB

MODEL_BYTES = 4096 * 1000
SECOND = 1_000_000_000
SURVIVES, THRASHES = Verdict.SURVIVES, Verdict.THRASHES


def lived(*, reread: int | None = 0, major: int = 7, waited_s: float | None = 0, full_s: float = 0, **changes: Any) -> Result:  # fmt: skip
    """An ok cell that met its limit: 10 s, no refaults, no pressure."""
    base = make_result(
        make_cell(ram_limit_bytes=20 * GIB),
        peaks=Peaks(cgroup_bytes=20 * GIB),
        model_bytes=MODEL_BYTES,
        ready_ns=10 * SECOND,
        faults=Faults(100, major, reread),
        pressure=None if waited_s is None else Pressure(round(waited_s * SECOND), round(full_s * SECOND)),
        cost=Cost(wall_ns=12 * SECOND),
    )  # fmt: skip
    return replace(base, **changes)


SLOW: dict[str, Any] = {"reread": 2500, "major": 900, "waited_s": 4, "full_s": 1}
BELOW = Peaks(cgroup_bytes=20 * GIB - 4096)
LATE: dict[str, Any] = {"outcome": Outcome.TIMEOUT, "message": "still running after 60 s", "ready_ns": None}  # fmt: skip
COMMAND = Cell.of_command("x", ("x",), "cgroup", ram_limit_bytes=100 * MIB)
LIMIT_PAGES = 100 * MIB // 4096
RUN: dict[str, Any] = {"cell": COMMAND, "peaks": Peaks(cgroup_bytes=100 * MIB), "model_bytes": None, "major": 900, "waited_s": 1, "full_s": 1}  # fmt: skip
READ_AGAIN, STALLED_S = round(REFAULTS_PER_MODEL * 1000), STALLED_SHARE * 10
IMPORTED = {"baseline": Memory(0, 0, 2 * MODEL_BYTES, 0)}
OFTEN: dict[str, Any] = {"waited_s": None, "baseline": None}
ENDS: dict[str, tuple[Result, float | None]] = {
    "ends in good time": (lived(), 9),
    "without a time to compare with": (lived(), None),
    "refaults and lost time": (lived(**SLOW), 4),
    "so it is where the peak is not known": (lived(**SLOW, peaks=Peaks()), 4),
    "below its limit": (lived(**SLOW, peaks=BELOW), 4),
    "a wait of less than half a second": (lived(ready_ns=SECOND, waited_s=0.4), None),
    "half a second longer": (lived(ready_ns=SECOND, reread=2500), 0.5),
    "less than half a second longer": (lived(ready_ns=round(0.9 * SECOND), reread=2500), 0.45),
    "on large pages": (lived(reread=250, major=900, environment={"page_bytes": 65536}), 5),
    "a command that reads much of its limit again": (lived(**RUN, reread=LIMIT_PAGES // 5), 4),
    "a command in good time": (lived(**RUN, reread=LIMIT_PAGES // 5), 9),
    "a command that reads little again": (lived(**RUN, reread=LIMIT_PAGES // 20), 4),
    "late, with enough memory": (lived(**LATE), 1),
    "late, and memory lacked": (lived(**LATE, reread=3000, major=5), None),
    "late below its limit": (lived(**SLOW, **LATE, peaks=BELOW), 4),
    "killed": (make_result(make_cell("baseline"), SCRIPTS["baseline"]), None),
    "killed by the GPU": (lived(outcome=Outcome.CUDA_OOM, message="CUDA out of memory"), None),
    "lost children": (lived(outcome=Outcome.STRATEGY_FAILED, message="Broken", oom_kills=2), None),
    "failed otherwise": (lived(outcome=Outcome.STRATEGY_FAILED, message="Broken"), None),
    "ended by weighin": (lived(outcome=Outcome.THRASHING, message="ended after 5 s"), None),
    "without a limit": (lived(**SLOW, cell=make_cell(ram_limit_bytes=None)), 4),
    "refaults, and as late as is too late": (lived(reread=READ_AGAIN), 10 / SLOWDOWN),
    "a refault less": (lived(reread=READ_AGAIN - 1), 10 / SLOWDOWN),
    "a nanosecond less late": (lived(reread=READ_AGAIN), 10 / SLOWDOWN + 1e-9),
    "a wait alone": (lived(waited_s=STALLED_S), 10),
    "a nanosecond less of a wait": (lived(waited_s=STALLED_S - 1e-9), 1),
    "neither refaults nor waits are known": (lived(reread=None, waited_s=None), 1),
    "refaults alone": (lived(reread=READ_AGAIN, waited_s=None), None),
    "refaults and a wait": (lived(reread=READ_AGAIN, waited_s=STALLED_S), None),
    "waits are not known": (lived(waited_s=None), None),
    "more than three times its size, whatever its time": (lived(reread=3001, **OFTEN), None),
    "three times its size": (lived(reread=3000, **OFTEN), None),
    "more than three times a model and what was imported": (lived(reread=6001, **OFTEN | IMPORTED), None),
    "three times a model and what was imported": (lived(reread=6000, **OFTEN | IMPORTED), None),
    "a command that reads the size of a model often": (lived(reread=9000, **OFTEN, cell=replace(COMMAND, ram_limit_bytes=20 * GIB)), None),
    "a model of unknown size": (lived(reread=9000, **OFTEN | {"model_bytes": None}), None),
}  # fmt: skip


def test_each_end_has_its_verdict_and_the_figures_of_it(same: Compare) -> None:
    lines = []
    for name, (result, reference_s) in ENDS.items():
        found = judge_result(result, None if reference_s is None else round(reference_s * SECOND))
        said = f"{found.verdict}: {found.reason}" if found else "no verdict"
        lines.append(f"{name}\n  {said}\n")
    same("verdicts.txt", "".join(lines))


def test_a_run_is_judged_against_its_own_cell_without_a_limit_or_the_highest_above() -> None:
    def cell(limit: int | None, seconds: float, strategy: str = "a", repeat: int = 0) -> Result:
        ours = make_cell(strategy, ram_limit_bytes=limit, repeat=repeat)
        return lived(cell=ours, ready_ns=round(seconds * SECOND), faults=Faults(1, 1, 500))

    results = [
        cell(None, 3, repeat=0), cell(None, 4, repeat=1), cell(None, 9, repeat=2),  # median 4 s
        cell(2 * GIB, 7), cell(GIB, 8),
        cell(2 * GIB, 7, "b"), cell(GIB, 20, "b"),
    ]  # fmt: skip
    found = judge_all(results)
    said = [found[result.cell.id] for result in results]
    assert said[:3] == [None, None, None]
    assert [(one.verdict, one.reason.partition(";")[0]) for one in said[3:] if one] == [
        (SURVIVES, "7.00 s, 1.8x the time without a limit: 4.00 s"),
        (THRASHES, "8.00 s, 2.0x the time without a limit: 4.00 s"),
        (SURVIVES, "7.00 s"),  # nothing above it: refaults alone decide nothing
        (THRASHES, "20.0 s, 2.9x the time without a limit: 7.00 s"),
    ]


# -- while it runs


def seen(**changes: int | None) -> Stopped | None:
    usual: dict[str, Any] = {"after_ns": 5 * SECOND, "reread_bytes": 0, "waited_ns": 0}
    return proof(Reference(4 * SECOND, GIB), **usual | changes)


LATE_NS = 40 * SECOND + 1  # more than ten times as late as without a limit
PROOFS: tuple[dict[str, Any], ...] = (
    {"reread_bytes": 3 * GIB + 1},
    {"after_ns": LATE_NS, "reread_bytes": GIB // 10 + 1},
    {"after_ns": 50 * SECOND, "waited_ns": 10 * SECOND},
    {"after_ns": 50 * SECOND, "reread_bytes": GIB, "is_loading": False},
    {"after_ns": 20 * SECOND, "waited_ns": 12 * SECOND + 1},
)
NO_PROOFS: tuple[dict[str, Any], ...] = (
    {"reread_bytes": 3 * GIB},
    {"reread_bytes": 3 * GIB + 1, "is_loading": False},
    {"after_ns": 400 * SECOND, "reread_bytes": None, "waited_ns": None},
    {"after_ns": LATE_NS - 1, "reread_bytes": GIB // 10 + 1},
    {"after_ns": LATE_NS, "reread_bytes": GIB // 20},
    {"after_ns": 20 * SECOND, "waited_ns": 12 * SECOND},
)


def test_each_proof_is_where_it_is_written() -> None:
    assert [one for one in PROOFS if not seen(**one)] == []
    assert [one for one in NO_PROOFS if seen(**one)] == []


def test_a_proof_has_the_figures_and_says_them() -> None:
    found = seen(reread_bytes=4 * GIB, waited_ns=None)
    assert found == Stopped(5 * SECOND, None, 4 * SECOND, GIB, 4 * GIB, None)
    assert why_killed(found) == (
        "stopped by weighin after 5.00 s, because it thrashes; 4.0x of 1.000 GiB read again"
    )
    waited = seen(waited_ns=13 * SECOND)
    assert waited and why_killed(waited).endswith("; waited 13.0 s for memory")


def test_a_load_is_compared_with_its_model_and_a_small_one_with_the_import() -> None:
    first = make_result(make_cell(ram_limit_bytes=None), cost=Cost(wall_ns=7 * SECOND))
    assert first.model_bytes and first.baseline
    assert reference_of(first) == Reference(7 * SECOND, first.model_bytes)
    tiny = replace(first, model_bytes=MIB)
    assert reference_of(tiny) == Reference(7 * SECOND, first.baseline.file_bytes)
    assert reference_of(None) is reference_of(replace(first, cost=None)) is None


def test_a_command_is_compared_with_what_it_needed_and_cached() -> None:
    first = lived(
        cell=COMMAND,
        peaks=Peaks(file_sampled_bytes=300 * MIB),
        ready_ns=2 * SECOND,
        cost=Cost(wall_ns=3 * SECOND),
        ran=Ran(1, needed_bytes=100 * MIB),
    )
    assert reference_of(first) == Reference(2 * SECOND, 400 * MIB)
