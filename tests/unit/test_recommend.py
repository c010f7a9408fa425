"""What fits, what does not and why, and the order: from predictions, and from what was measured."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from weighin.cell import Cell, ModelSpec
from weighin.cli.app import app
from weighin.errors import ConfigError
from weighin.predict.prediction import Prediction, Work
from weighin.recommend import answer
from weighin.recommend.candidates import (
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
    read_bytes_per_s=GIB,
    read_direct_bytes_per_s=2 * GIB,
    map_bytes_per_s=GIB // 2,
    fault_bytes_per_s=4 * GIB,
    copy_bytes_per_s=8 * GIB,
    init_bytes_per_s=GIB // 2,
    archive_s=0.001,
    module_s=0.002,
)


def info(name: str) -> StrategyInfo:
    return StrategyInfo(name, Path(f"{name}.py"), "", ("pt",), ("cpu", "cuda"))


def prediction(name: str, copies: float, *, mapped: bool = False) -> Prediction:
    anon = 150 * MIB + round(copies * MODEL)
    work = Work(mapped_bytes=MODEL) if mapped else Work(read_bytes=MODEL, fresh_bytes=MODEL)
    return Prediction(
        Cell(ModelSpec("m", "a:b"), name, "process"),
        model_bytes=MODEL,
        baseline_anon_bytes=150 * MIB,
        host_anon_peak_bytes=anon,
        tensor_peak_bytes=anon - 150 * MIB,
        host_file_peak_bytes=MODEL + 80 * MIB if mapped else 80 * MIB,
        floor_bytes=anon + 16 * MIB,
        disk_read_bytes=MODEL,
        work=work,
    )


def judged(
    name: str = "load_assign",
    copies: float = 1.0,
    ram: int | None = 8 * GIB,
    evidence: Evidence | None = None,
    *,
    mapped: bool = False,
) -> Candidate:
    found = prediction(name, copies, mapped=mapped)
    return assess(info(name), found, evidence, predicted_ready_s(found, SPEEDS), Limits(ram), "pt")


@pytest.mark.parametrize(
    ("copies", "mapped", "ram", "verdict", "why"),
    [
        (1.0, False, 8 * GIB, FitVerdict.FITS, "keeps one copy: 4.2 GiB"),
        (2.0, False, 8 * GIB, FitVerdict.CLOSE, "keeps two copies: 8.2 GiB"),
        (2.0, False, 7 * GIB, FitVerdict.TOO_LARGE, "keeps two copies: 8.2 GiB"),
        (1.5, False, 8 * GIB, FitVerdict.FITS, "keeps 1.5 times the model: 6.2 GiB"),
        (0.0, True, 8 * GIB, FitVerdict.FITS, "keeps 166.0 MiB and mapped pages of the file"),
        (
            0.0, True, 2 * GIB, FitVerdict.THRASHES,
            "its 4.0 GiB of file pages do not fit: each forward pass reads them again",
        ),
        (2.0, False, None, FitVerdict.FITS, "keeps two copies: 8.2 GiB"),
    ],
)  # fmt: skip
def test_a_prediction_is_judged(
    copies: float, mapped: bool, ram: int | None, verdict: FitVerdict, why: str
) -> None:
    found = judged("x", copies, ram, mapped=mapped)
    assert (found.verdict, found.why) == (verdict, why)
    assert found.memory_from == found.time_from == "predicted"


def test_what_was_tried_is_believed_before_any_prediction() -> None:
    times: dict[int | None, list[float]] = {7 * GIB: [2.0, 9.0, 3.0]}
    lived = Evidence(ok_limits=[7 * GIB], anon_bytes=3 * GIB, ready_s=times)
    found = judged(copies=2.0, ram=7 * GIB, evidence=lived)
    assert (found.verdict, found.why) == (FitVerdict.FITS, "keeps 0.7 times the model: 3.0 GiB")
    assert (found.memory_from, found.time_from, found.ready_s) == ("measured", "measured", 3.0)
    died = Evidence(killed_limits=[7 * GIB])
    assert judged(copies=1.0, ram=6 * GIB, evidence=died).verdict is FitVerdict.TOO_LARGE
    assert judged(copies=1.0, ram=8 * GIB, evidence=died).verdict is FitVerdict.FITS


@pytest.mark.parametrize(
    ("ram", "verdict"),
    [
        (4 * GIB, FitVerdict.TOO_LARGE),
        (5 * GIB, FitVerdict.CLOSE),  # some processes would live: nobody can say which
        (6 * GIB, FitVerdict.CLOSE),
        (7 * GIB, FitVerdict.FITS),
    ],
)
@pytest.mark.parametrize("measured", [None, 4.3, 5.5, 6.2])
def test_what_dies_in_some_processes_only_is_neither_refused_nor_named(
    ram: int, verdict: FitVerdict, measured: float | None
) -> None:
    unsteady = replace(
        prediction("x", 1.5),
        host_anon_peak_bytes=5 * GIB,
        host_anon_least_bytes=4 * GIB + 300 * MIB,
        host_anon_most_bytes=6 * GIB + 200 * MIB,
        floor_bytes=6 * GIB + 216 * MIB,
    )
    found = Evidence(anon_bytes=round(measured * GIB)) if measured else None
    assert assess(info("x"), unsteady, found, None, Limits(ram), "pt").verdict is verdict


def test_a_measured_need_has_the_room_that_a_predicted_one_has() -> None:
    held = prediction("x", 0.1, mapped=True)
    read_ahead = replace(held, floor_bytes=(held.floor_bytes or 0) + 32 * MIB)
    lived = Evidence([None], [], held.host_anon_peak_bytes, None, {None: [5.0]})
    found = assess(info("x"), read_ahead, lived, None, Limits(8 * GIB), "pt")
    assert (found.need_bytes, found.memory_from) == (read_ahead.floor_bytes, "measured")
    unknown = replace(read_ahead, cannot="odd", host_anon_peak_bytes=None, floor_bytes=None)
    found = assess(info("x"), unknown, lived, None, Limits(8 * GIB), "pt")
    assert found.need_bytes == held.floor_bytes


def test_a_gpu_that_is_too_small_refuses() -> None:
    big = replace(prediction("x", 0.1), cuda_reserved_bytes=2 * GIB)
    found = assess(info("x"), big, None, 1.0, Limits(None, GIB), "pt")
    assert (found.verdict, found.why) == (FitVerdict.TOO_LARGE, "needs 2.0 GiB of GPU memory")


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work(read_bytes=MODEL), 4.0),
        (Work(read_direct_bytes=MODEL), 2.0),
        (Work(fresh_bytes=MODEL), 1.0),
        (Work(written_bytes=MODEL), 0.5),
        (Work(random_bytes=MODEL), 8.0),
        (Work(archives=800), 0.8),
        (Work(modules=400), 0.8),
    ],
)
def test_the_time_is_that_of_all_that_a_load_does(work: Work, seconds: float) -> None:
    one = replace(prediction("x", 1.0), work=work)
    assert predicted_ready_s(one, SPEEDS) == pytest.approx(seconds + 0.5)  # read once at last


def timed(strategy: str, ready_s: float, noise_s: float | None = None, **more: Any) -> Candidate:
    """A measured candidate; a predicted one with ``time_from="predicted"``."""
    one = replace(judged(strategy), ready_s=ready_s, noise_s=noise_s, time_from="measured")
    return replace(one, **more)


def names(candidates: list[Candidate]) -> list[str]:
    return [one.strategy for one in ranked(candidates)]


def test_who_asks_for_less_comes_first_among_what_the_repeats_do_not_tell_apart() -> None:
    order = names([
        timed("far", 9.7),
        timed("fastest", 9.0, 0.5, asks=("weighin",)),
        timed("hungry", 9.4, need_bytes=5 * GIB),
        timed("best", 9.5, need_bytes=4 * GIB),
    ])  # fmt: skip
    assert order == ["best", "hungry", "fastest", "far"]


def test_a_prediction_comes_first_where_it_takes_less_than_half_of_what_was_measured() -> None:
    order = names([
        timed("baseline", 18.0),
        timed("streaming", 3.4, time_from="predicted", asks=("weighin",)),
        timed("load_assign", 10.0, time_from="predicted"),
    ])  # fmt: skip
    assert order == ["streaming", "baseline", "load_assign"]


def test_predictions_alone_are_ordered_by_time_and_what_they_ask_where_that_is_the_same() -> None:
    predicted: dict[str, Any] = {"time_from": "predicted"}
    order = names([
        timed("load_assign", 2.6, **predicted),
        timed("mmap_assign", 2.1, **predicted),
        timed("safetensors_mmap", 2.0, asks=("saved as safetensors", "safetensors"), **predicted),
        timed("streaming", 2.5, asks=("weighin",), **predicted),
        replace(timed("nobody knows", 0.0), ready_s=None, time_from=""),
    ])  # fmt: skip
    assert order == [
        "mmap_assign", "streaming", "load_assign", "safetensors_mmap", "nobody knows",
    ]  # fmt: skip


def test_direct_reads_of_several_ranks_hinder_each_other() -> None:
    one = replace(prediction("x", 1.0), work=Work(read_direct_bytes=2 * MODEL))
    two = replace(one, cell=replace(one.cell, ranks=2))
    assert predicted_ready_s(two, SPEEDS) - predicted_ready_s(one, SPEEDS) == pytest.approx(4.0)


def test_what_an_import_takes_is_no_copy_of_a_tiny_model() -> None:
    tiny = replace(
        prediction("x", 0.0),
        model_bytes=20 * MIB,
        host_anon_peak_bytes=240 * MIB,
        tensor_peak_bytes=20 * MIB,
        floor_bytes=256 * MIB,
    )
    found = assess(info("x"), tiny, None, 1.0, Limits(GIB), "pt")
    assert found.why == "keeps one copy: 256.0 MiB"


@pytest.mark.parametrize("apart", [-40 * MIB, 40 * MIB])
def test_a_measurement_that_agrees_moves_no_verdict(apart: int) -> None:
    predicted = prediction("x", 1.0)
    floor = predicted.floor_bytes or 0
    lived = Evidence([None], [], floor - 16 * MIB + apart, None, {None: [5.0]})
    for limit in range(floor - 256 * MIB, floor + 256 * MIB, 8 * MIB):
        before, after = judged(ram=limit), judged(ram=limit, evidence=lived)
        assert before.verdict is after.verdict
    assert (before.need_bytes, after.need_bytes) == (floor, floor + apart)
    assert (before.memory_from, after.memory_from) == ("predicted", "measured")


def test_a_measurement_that_refutes_the_prediction_counts() -> None:
    lived = Evidence([None], [], 6 * GIB, None, {None: [5.0]})
    assert judged(ram=5 * GIB).verdict is FitVerdict.FITS
    assert judged(ram=5 * GIB, evidence=lived).verdict is FitVerdict.TOO_LARGE


def test_among_what_reads_again_and_again_no_time_decides() -> None:
    again = replace(judged("x", copies=0.0, ram=2 * GIB, mapped=True), need_bytes=GIB)
    order = ranked([
        replace(again, strategy="elsewhere", ready_s=3.0, asks=("saved as per_param",)),
        replace(again, strategy="measured here", ready_s=60.0),
    ])  # fmt: skip
    assert [one.strategy for one in order] == ["measured here", "elsewhere"]


def test_measured_loads_say_how_slow_the_machine_is() -> None:
    nothing = replace(
        prediction("x", 0.0), model_bytes=0, work=Work()
    )  # takes no time, as predicted
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
    result = CliRunner().invoke(app, ["recommend", "gpt2-tiny"])
    assert str(result.exception) == "reported"
