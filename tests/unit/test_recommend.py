"""What fits, what does not and why, and the order: from predictions, and from what was measured."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from snapshots import Compare
from typed_here import typed

from weighin.cell import Cell, ModelSpec
from weighin.errors import ConfigError
from weighin.predict.prediction import Prediction, Work
from weighin.recommend import answer
from weighin.recommend.candidates import (
    OWN_CODE,
    Candidate,
    FitVerdict,
    Limits,
    Speeds,
    assess,
    predicted_ready_s,
    ranked,
    slowness,
)
from weighin.recommend.prior_runs import Evidence
from weighin.suite.registry import StrategyInfo
from weighin.units import GIB, MIB

MODEL = 4 * GIB
SPEEDS = Speeds(
    read_bytes_per_s=GIB, read_direct_bytes_per_s=2 * GIB, map_bytes_per_s=GIB // 2,
    fault_bytes_per_s=4 * GIB, copy_bytes_per_s=8 * GIB, init_bytes_per_s=GIB // 2,
    archive_s=0.001, module_s=0.002,
)  # fmt: skip


def info(name: str) -> StrategyInfo:
    return StrategyInfo(name, Path(f"{name}.py"), "", ("pt",), ("cpu", "cuda"))


def prediction(name: str, copies: float, *, mapped: bool = False) -> Prediction:
    anon = 150 * MIB + round(copies * MODEL)
    work = Work(mapped_bytes=MODEL) if mapped else Work(read_bytes=MODEL, fresh_bytes=MODEL)
    return Prediction(
        Cell(ModelSpec("m", "a:b"), name, "process"), model_bytes=MODEL, disk_read_bytes=MODEL, work=work,
        baseline_anon_bytes=150 * MIB, host_anon_peak_bytes=anon, tensor_peak_bytes=anon - 150 * MIB,
        host_file_peak_bytes=MODEL * mapped + 80 * MIB, floor_bytes=anon + 16 * MIB,
    )  # fmt: skip


def judged(
    one: Prediction, ram: int | None = 8 * GIB, evidence: Evidence | None = None, **limits: int
) -> Candidate:
    seconds = predicted_ready_s(one, SPEEDS)
    return assess(info("x"), one, evidence, seconds, Limits(ram, **limits), "pt")


def lived(anon_gib: float, **changes: Any) -> Evidence:
    return Evidence(anon_bytes=round(anon_gib * GIB), ready_s={None: [5.0]}, **changes)


HELD = prediction("x", 0.1, mapped=True)
READ_AHEAD = replace(HELD, floor_bytes=(HELD.floor_bytes or 0) + 32 * MIB)
TINY = replace(
    prediction("x", 0.0), model_bytes=20 * MIB, host_anon_peak_bytes=240 * MIB,
    tensor_peak_bytes=20 * MIB, floor_bytes=256 * MIB,
)  # fmt: skip
JUDGED = {
    "one copy": judged(prediction("x", 1.0)),
    "two copies, as large as the limit": judged(prediction("x", 2.0)),
    "two copies, larger than the limit": judged(prediction("x", 2.0), 7 * GIB),
    "two copies without a limit": judged(prediction("x", 2.0), None),
    "a copy and a half": judged(prediction("x", 1.5)),
    "mapped": judged(prediction("x", 0.0, mapped=True)),
    "mapped below its size": judged(prediction("x", 0.0, mapped=True), 2 * GIB),
    "what an import takes is no copy of a tiny model": judged(TINY, GIB),
    "a GPU that is too small": judged(replace(HELD, cuda_reserved_bytes=2 * GIB), None, vram_bytes=GIB),
    "it lived under this limit: its median time": judged(
        prediction("x", 2.0), 7 * GIB, Evidence(ok_limits=[7 * GIB], anon_bytes=3 * GIB, ready_s={7 * GIB: [2.0, 9.0, 3.0]}),
    ),
    "it died under a higher limit": judged(prediction("x", 1.0), 6 * GIB, Evidence(killed_limits=[7 * GIB])),
    "it died under a lower limit": judged(prediction("x", 1.0), 8 * GIB, Evidence(killed_limits=[7 * GIB])),
    "measured more than predicted": judged(prediction("x", 1.0), 5 * GIB, lived(6.0)),
    "the same without the measurement": judged(prediction("x", 1.0), 5 * GIB),
    "a measured need has the room that a predicted one has": judged(
        READ_AHEAD, 8 * GIB, lived((HELD.host_anon_peak_bytes or 0) / GIB, ok_limits=[None])
    ),
    "a measured need of what cannot be predicted": judged(
        replace(READ_AHEAD, cannot="odd", host_anon_peak_bytes=None, floor_bytes=None),
        8 * GIB, lived((HELD.host_anon_peak_bytes or 0) / GIB, ok_limits=[None]),
    ),
}  # fmt: skip


def test_predictions_and_measurements_are_judged(same: Compare) -> None:
    lines = [
        f"{name}\n    {one.verdict}: {one.why}\n    memory {one.memory_from}: {one.need_bytes},"
        f" time {one.time_from}: {one.ready_s}\n"
        for name, one in JUDGED.items()
    ]
    same("assessed.txt", "".join(lines))


@pytest.mark.parametrize("measured", [None, 4.3, 5.5, 6.2])
def test_what_dies_in_some_processes_only_is_neither_refused_nor_named(
    measured: float | None,
) -> None:
    unsteady = replace(
        prediction("x", 1.5), host_anon_peak_bytes=5 * GIB,
        host_anon_least_bytes=4 * GIB + 300 * MIB, host_anon_most_bytes=6 * GIB + 200 * MIB,
        floor_bytes=6 * GIB + 216 * MIB,
    )  # fmt: skip
    found = lived(measured) if measured else None
    # Under 5 and 6 GiB, some processes would live: nobody can say which.
    verdicts = {4: "does not fit", 5: "too close to tell", 6: "too close to tell", 7: "fits"}
    assert {gib: str(judged(unsteady, gib * GIB, found).verdict) for gib in verdicts} == verdicts


def test_the_time_is_that_of_all_that_a_load_does() -> None:
    for work, seconds in {
        Work(read_bytes=MODEL): 4.0, Work(read_direct_bytes=MODEL): 2.0,
        Work(fresh_bytes=MODEL): 1.0, Work(written_bytes=MODEL): 0.5,
        Work(random_bytes=MODEL): 8.0, Work(archives=800): 0.8, Work(modules=400): 0.8,
    }.items():  # fmt: skip
        one = replace(prediction("x", 1.0), work=work)
        assert predicted_ready_s(one, SPEEDS) == pytest.approx(seconds + 0.5)  # read once at last


def timed(
    strategy: str, ready_s: float | None, noise_s: float | None = None, **more: Any
) -> Candidate:
    """A candidate whose time is measured, if it is not said to be predicted."""
    one = replace(judged(prediction(strategy, 1.0)), strategy=strategy, ready_s=ready_s)
    return replace(one, noise_s=noise_s, **({"time_from": "measured"} | more))


PREDICTED: dict[str, Any] = {"time_from": "predicted"}
AGAIN: dict[str, Any] = {"verdict": FitVerdict.THRASHES, "need_bytes": GIB}
OURS: dict[str, Any] = {"asks": ("weighin",)}
ORDERS: dict[str, tuple[list[Candidate], str]] = {
    "who asks for less comes first among what the repeats do not tell apart": ([
        timed("far", 9.7), timed("fastest", 9.0, 0.5, **OURS),
        timed("hungry", 9.4, need_bytes=5 * GIB), timed("best", 9.5, need_bytes=4 * GIB),
    ], "best hungry fastest far"),
    "a prediction comes first where it takes less than half of what was measured": ([
        timed("baseline", 18.0), timed("streaming", 3.4, **PREDICTED, **OURS),
        timed("load_assign", 10.0, **PREDICTED),
    ], "streaming baseline load_assign"),
    "predictions alone are ordered by time, and by what they ask where that is the same": ([
        timed("load_assign", 2.6, **PREDICTED), timed("mmap_assign", 2.1, **PREDICTED),
        timed("mapped", 2.0, asks=("saved as safetensors", "safetensors"), **PREDICTED),
        timed("streaming", 2.5, **PREDICTED, **OURS), timed("unknown", None, time_from=""),
    ], "mmap_assign streaming load_assign mapped unknown"),
    "a tenth of a second that is predicted decides nothing": ([
        timed("own_code", 0.05, asks=(OWN_CODE,), **PREDICTED), timed("slower", 0.16, **PREDICTED),
        timed("one_call", 0.14, **PREDICTED),
    ], "one_call own_code slower"),
    "among what reads again and again no time decides": ([
        timed("elsewhere", 3.0, asks=("saved as per_param",), **AGAIN), timed("here", 60.0, **AGAIN),
    ], "here elsewhere"),
}  # fmt: skip


@pytest.mark.parametrize(("candidates", "order"), ORDERS.values(), ids=ORDERS)
def test_the_order_of_candidates(candidates: list[Candidate], order: str) -> None:
    assert [one.strategy for one in ranked(candidates)] == order.split()


def test_direct_reads_of_several_ranks_hinder_each_other() -> None:
    one = replace(prediction("x", 1.0), work=Work(read_direct_bytes=2 * MODEL))
    two = replace(one, cell=replace(one.cell, ranks=2))
    assert predicted_ready_s(two, SPEEDS) - predicted_ready_s(one, SPEEDS) == pytest.approx(4.0)


@pytest.mark.parametrize("apart", [-40 * MIB, 40 * MIB])
def test_a_measurement_that_agrees_moves_no_verdict(apart: int) -> None:
    predicted = prediction("x", 1.0)
    floor = predicted.floor_bytes or 0
    agrees = Evidence([None], [], floor - 16 * MIB + apart, None, {None: [5.0]})
    for limit in range(floor - 256 * MIB, floor + 256 * MIB, 8 * MIB):
        before, after = judged(predicted, limit), judged(predicted, limit, agrees)
        assert before.verdict is after.verdict
    assert (before.need_bytes, after.need_bytes) == (floor, floor + apart)
    assert (before.memory_from, after.memory_from) == ("predicted", "measured")


def test_measured_loads_say_how_slow_the_machine_is() -> None:
    nothing = replace(prediction("x", 0.0), model_bytes=0, work=Work())  # it takes no time
    loads = [(prediction("x", copies), Evidence(ready_s={None: [9.0]})) for copies in (1.0, 2.0)]
    quiet_s = predicted_ready_s(loads[0][0], SPEEDS)
    assert slowness([*loads, (nothing, loads[0][1])], SPEEDS) == pytest.approx(9.0 / quiet_s)
    assert slowness([], SPEEDS) == slowness([(nothing, loads[0][1])], SPEEDS) == 1.0


def test_the_name_of_a_strategy_is_no_markup_of_the_spinner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gather(_: object, report: Callable[[str], None]) -> None:
        report("my[/x]: 0 of 1 done")
        raise ConfigError("reported")

    monkeypatch.setattr(answer, "gather", gather)
    code, text = typed("recommend", "gpt2-tiny")
    assert code == 2
    assert text.endswith("reported")
