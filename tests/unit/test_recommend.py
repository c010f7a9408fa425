"""What fits, what does not and why, and the order: from predictions, and from what was measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.calibrating import Calibration
from harness.cell import Cell, ModelSpec
from harness.predict.prediction import PredictedPhase, Prediction
from harness.recommend.evidence import Evidence
from harness.recommend.judging import Candidate, Limits, Verdict, judge, predicted_ready_s, ranked
from harness.registry import StrategyInfo
from harness.units import GIB, MIB

MODEL = 4 * GIB
CALIBRATION = Calibration(1 * GIB, 2 * GIB, 4 * GIB, 8 * GIB, 0.5 * GIB, 0.75)


def info(name: str) -> StrategyInfo:
    return StrategyInfo(name, Path(f"{name}.py"), "", ("pt",), ("cpu", "cuda"))


def prediction(name: str, copies: float, *, mapped: bool = False) -> Prediction:
    anon = 150 * MIB + round(copies * MODEL)
    phases = (PredictedPhase("build", 150 * MIB, 0), PredictedPhase("read", anon, 0))
    return Prediction(
        Cell(ModelSpec("m", "a:b"), name, "process"),
        model_bytes=MODEL,
        baseline_anon_bytes=150 * MIB,
        host_anon_peak_bytes=anon,
        host_file_peak_bytes=MODEL + 80 * MIB if mapped else 80 * MIB,
        floor_bytes=anon + 16 * MIB,
        disk_read_bytes=MODEL,
        phases=phases,
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
    return judge(info(name), found, evidence, CALIBRATION, Limits(ram), "pt")


@pytest.mark.parametrize(
    ("copies", "mapped", "ram", "verdict", "why"),
    [
        (1.0, False, 8 * GIB, Verdict.FITS, "keeps one copy: 4.2 GiB"),
        (2.0, False, 8 * GIB, Verdict.CLOSE, "keeps two copies: 8.2 GiB"),
        (2.0, False, 7 * GIB, Verdict.TOO_LARGE, "keeps two copies: 8.2 GiB"),
        (1.5, False, 8 * GIB, Verdict.FITS, "keeps 1.5 times the model: 6.2 GiB"),
        (0.0, True, 8 * GIB, Verdict.FITS, "keeps pages of the file, and 166.0 MiB"),
        (
            0.0, True, 2 * GIB, Verdict.THRASHES,
            "its 4.0 GiB of file pages do not fit: each pass reads them again",
        ),
        (2.0, False, None, Verdict.FITS, "keeps two copies: 8.2 GiB"),
    ],
)  # fmt: skip
def test_a_prediction_is_judged(
    copies: float, mapped: bool, ram: int | None, verdict: Verdict, why: str
) -> None:
    found = judged("x", copies, ram, mapped=mapped)
    assert (found.verdict, found.why) == (verdict, why)
    assert found.memory_from == found.time_from == "predicted"


def test_what_was_tried_is_believed_before_any_prediction() -> None:
    lived = Evidence(ok_limits=[7 * GIB], anon_bytes=3 * GIB, ready_s=[2.0, 9.0, 3.0])
    found = judged(copies=2.0, ram=7 * GIB, evidence=lived)
    assert (found.verdict, found.why) == (Verdict.FITS, "keeps 0.7 times the model: 3.0 GiB")
    assert (found.memory_from, found.time_from, found.ready_s) == ("measured", "measured", 3.0)
    died = Evidence(killed_limits=[7 * GIB])
    assert judged(copies=1.0, ram=6 * GIB, evidence=died).verdict is Verdict.TOO_LARGE
    assert judged(copies=1.0, ram=8 * GIB, evidence=died).verdict is Verdict.FITS


def test_what_was_not_followed_is_not_known() -> None:
    unknown = Prediction(Cell(ModelSpec("m", "a:b"), "x", "process"), cannot="ValueError: odd")
    found = judge(info("x"), unknown, None, CALIBRATION, Limits(GIB), "pt")
    assert (found.verdict, found.why, found.ready_s) == (Verdict.UNKNOWN, "ValueError: odd", None)


def test_a_gpu_that_is_too_small_refuses() -> None:
    big = replace(prediction("x", 0.1), cuda_reserved_bytes=2 * GIB)
    found = judge(info("x"), big, None, CALIBRATION, Limits(None, GIB), "pt")
    assert (found.verdict, found.why) == (Verdict.TOO_LARGE, "takes 2.0 GiB of the GPU")


def test_the_time_is_that_of_reading_touching_and_copying() -> None:
    # 4 s from the disk, 1 s of faults, 0.25 + 0.5 s of copies, 0.75 s of the meta device.
    assert predicted_ready_s(prediction("load_assign", 1.0), CALIBRATION) == pytest.approx(6.5)
    assert predicted_ready_s(prediction("streaming", 1.0), CALIBRATION) == pytest.approx(3.75)


def test_among_the_fast_who_asks_for_less_comes_first() -> None:
    fast = judged("a")
    order = ranked([
        replace(fast, strategy="far", ready_s=16.0),
        replace(fast, strategy="asks", ready_s=9.0, asks=("weighin",)),
        replace(fast, strategy="hungry", ready_s=10.0, need_bytes=5 * GIB),
        replace(fast, strategy="best", ready_s=12.0, need_bytes=4 * GIB),
        replace(fast, strategy="dead", verdict=Verdict.TOO_LARGE, ready_s=1.0),
        replace(fast, strategy="close", verdict=Verdict.CLOSE, ready_s=1.0),
    ])  # fmt: skip
    assert [one.strategy for one in order] == ["best", "hungry", "asks", "far", "close", "dead"]


def test_a_checkpoint_of_another_layout_must_be_saved_again() -> None:
    found = judge(
        info("streaming"), prediction("streaming", 1.0), None, None, Limits(), "safetensors"
    )
    assert found.asks == ("saved as pt", "weighin")
    assert found.ready_s is None
