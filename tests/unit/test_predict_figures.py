"""What follows from the figures of a prediction: floors, sums, words, and comparisons with a run."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import predicted_runs as checks
import pytest
from factories import make_cell, make_result, run_of
from rich.console import Console

from weighin.cell import Cell
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned
from weighin.predict import client, tables
from weighin.predict.prediction import (
    PredictedPhase,
    PredictedUse,
    Prediction,
    Work,
    from_json,
    reasons,
)
from weighin.result import Memory, Peaks, Use
from weighin.suite import registry
from weighin.units import GIB, MIB

CELL = make_cell("mmap_assign", ram_limit_bytes=None)
USE = PredictedUse(
    "adamw",
    540,
    690,
    300,
    host_anon_peak_bytes=590,
    host_file_peak_bytes=70,
    cuda_requested_bytes=11,
    cuda_allocated_bytes=12,
    cuda_reserved_bytes=13,
)
ONE = Prediction(
    CELL,
    model_bytes=100,
    host_anon_peak_bytes=400,
    host_anon_least_bytes=380,
    host_anon_most_bytes=420,
    tensor_peak_bytes=200,
    in_flight_bytes=7,
    floor_bytes=1000,
    cuda_requested_bytes=21,
    cuda_allocated_bytes=1,
)


def test_a_floor_for_some_processes_is_without_what_others_keep() -> None:
    assert ONE.floor_least_bytes == 1000 - (420 - 380) - 7
    assert replace(ONE, floor_bytes=None).floor_least_bytes is None
    with_use = replace(ONE, use=USE)
    assert with_use.floor_least_bytes == 1000 - (690 - 540) - 7
    small = replace(USE, host_anon_least_bytes=1, host_anon_most_bytes=2)
    assert replace(ONE, use=small).floor_least_bytes == ONE.floor_least_bytes
    unknown = replace(ONE, host_anon_least_bytes=None, host_anon_most_bytes=None)
    assert unknown.floor_least_bytes == 1000 - 7


def test_a_floor_is_so_much_above_the_highest_peak() -> None:
    assert ONE.above_peak_bytes == 1000 - 420
    assert replace(ONE, host_anon_most_bytes=None).above_peak_bytes == 1000 - 400
    assert replace(ONE, use=USE).above_peak_bytes == 1000 - 690
    assert replace(ONE, floor_bytes=None).above_peak_bytes == 16 * MIB
    assert Prediction(CELL, floor_bytes=1000, use=USE).above_peak_bytes == 16 * MIB


def test_the_tensors_are_those_of_load_and_use() -> None:
    assert ONE.with_use("tensor_peak_bytes") == 200
    assert replace(ONE, use=USE).with_use("tensor_peak_bytes") == 300
    assert Prediction(CELL).with_use("tensor_peak_bytes") is None


def test_the_gpus_peak_is_the_higher_one_of_load_and_use() -> None:
    kinds = ("cuda_requested_bytes", "cuda_allocated_bytes", "cuda_reserved_bytes")
    assert [ONE.with_use(kind) for kind in kinds] == [21, 1, None]
    assert [replace(ONE, use=USE).with_use(kind) for kind in kinds] == [21, 12, 13]


def test_a_prediction_comes_back_from_its_json() -> None:
    phases = (
        PredictedPhase(
            "read",
            host_anon_peak_bytes=1,
            host_file_peak_bytes=2,
            cuda_requested_bytes=3,
            cuda_allocated_bytes=4,
            cuda_reserved_bytes=5,
        ),
    )
    whole = replace(ONE, use=USE, phases=phases, reasons=("a", "b"), work=Work(1, 2))
    for one in (whole, Prediction(CELL, cannot="odd")):
        fields = asdict(one)
        fields["reasons"] = list(fields["reasons"])
        assert from_json(CELL, fields | {"error": ["a", "b"]}) == one
    assert from_json(CELL, {"cannot": "killed"}) == Prediction(CELL, cannot="killed")


@pytest.mark.parametrize(
    ("tensors", "mapped", "cuda", "words"),
    [
        (1000, 0, None, ["keeps one copy of the weights in memory"]),
        (2000, 0, 0, ["keeps two copies of the weights in memory"]),
        (3000, 0, None, ["keeps three copies of the weights in memory"]),
        (4000, 0, None, ["keeps 4 copies of the weights in memory"]),
        (970, 0, None, ["keeps one copy of the weights in memory"]),
        (969, 0, None, ["keeps 969 B in memory"]),
        (1030, 0, None, ["keeps one copy of the weights in memory"]),
        (1031, 0, None, ["keeps one copy of the weights and 31 B in memory"]),
        (500, 0, None, ["keeps 500 B in memory"]),
        (499, 499, None, []),
        (0, 500, None, ["maps 500 B, which the kernel may drop and read again"]),
        (0, 1000, None,
         ["maps one copy of the weights, which the kernel may drop and read again"]),
        (499, 0, 2000, ["keeps two copies of the weights on the GPU"]),
        (1000, 1000, 1000, [
            "keeps one copy of the weights on the GPU",
            "keeps one copy of the weights in memory",
            "maps one copy of the weights, which the kernel may drop and read again",
        ]),
    ],
)  # fmt: skip
def test_a_peak_is_explained_in_copies(
    tensors: int, mapped: int, cuda: int | None, words: list[str]
) -> None:
    assert list(reasons(1000, tensors, mapped, cuda)) == words


def test_ranks_add_their_number_to_the_reasons() -> None:
    several = replace(CELL, ranks=3)
    one = replace(
        ONE, reasons=("maps one copy",), work=Work(1, 2, 3, 4, 5, 6, 7, 8), floor_bytes=None
    )
    found = client.of_ranks(several, one)
    assert found.reasons == ("maps one copy", "in each of 3 ranks")
    assert found.work == Work(3, 6, 3, 12, 15, 18, 21, 24)
    assert (found.floor_bytes, found.baseline_anon_bytes) == (None, None)
    assert found.tensor_peak_bytes == 600


# -- tables


def shown(predictions: list[Prediction]) -> str:
    out = io.StringIO()
    for part in tables.tables(predictions):
        Console(file=out, width=120).print(part)
    return out.getvalue()


def cells_of(text: str, name: str) -> list[str]:
    """Return the cells of the first row of a table that begins with a name."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_a_table_of_nothing_but_failures_has_no_closing_line() -> None:
    failed = Prediction(CELL, cannot="odd")
    assert shown([failed]) == "mmap_assign (pt) is not predicted: odd\n"
    assert "Predicted by running each strategy" in shown([failed, replace(ONE, model_bytes=GIB)])


# -- what is not followed


def planned(name: str = "streaming", **changes: Any) -> Planned:
    info = registry.strategy(name)
    cell = Cell(registry.model("gpt2-tiny"), name, "process", format=info.formats[0])
    return plan_cell(replace(cell, **changes), info)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (planned(environment={"MALLOC_ARENA_MAX": "1"}),
         "weighin cannot predict the effect of MALLOC_ARENA_MAX=1"),
        (planned(use="fork", passes=0), "the use fork can only be measured"),
        (replace(planned("transformers", format="gguf"), skip=""),
         "weighin cannot predict how transformers dequantises a GGUF file"),
        (replace(planned("baseline", format="gguf"), skip=""),
         "weighin cannot predict how baseline dequantises a GGUF file"),
        (planned("dcp_fsdp", ranks=2), "weighin cannot predict the memory of tensors that ranks send to each other"),
        (planned(options={"key": "model"}), "weighin cannot predict the load of a part of a training checkpoint"),
        (planned(options={"disable_mmap": True}),
         "weighin cannot predict which of the files' bytes disable_mmap keeps in memory"),
        (planned(options={"offload_state_dict": True}),
         "weighin cannot predict the memory of weights that are written to a folder and read back"),
        (replace(planned(), skip="needs a GPU"), "needs a GPU"),
    ],
)  # fmt: skip
def test_a_cell_that_is_not_followed_says_why(one: Planned, why: str) -> None:
    told: list[tuple[int, str]] = []
    (found,) = client.predict([one], report=lambda *step: told.append(step))
    assert found == Prediction(one.cell, cannot=why)
    assert told == [(0, one.cell.strategy)]


def test_a_package_whose_reads_are_unknown_is_named() -> None:
    info = replace(registry.strategy("streaming"), packages=("zlib_ng>=2", "numpy", "anyio"))
    one = Planned(planned().cell, info)
    (found,) = client.predict([one])
    assert found.cannot == "weighin cannot predict how anyio, zlib_ng reads files"


# -- compared with a run

MEASURED = make_result(
    CELL,
    peaks=Peaks(
        anon_sampled_bytes=410, file_sampled_bytes=90, unreclaimable_sampled_bytes=415,
        cuda_requested_bytes=20, cuda_allocated_bytes=2, cuda_reserved_bytes=3,
    ),
    baseline=Memory(0, 0, 0, 0),
)  # fmt: skip
PREDICTED = replace(
    ONE,
    host_file_peak_bytes=80,
    cuda_requested_bytes=21,
    cuda_allocated_bytes=22,
    cuda_reserved_bytes=23,
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Answer each cell with the same figures, and note what was asked."""
    noted: list[dict[str, Any]] = []

    def predict(cells: list[Planned], **options: Any) -> list[Prediction]:
        noted.append({"strategies": [one.cell.strategy for one in cells], **options})
        use = USE if cells[0].cell.use else None
        return [replace(PREDICTED, cell=one.cell, use=use) for one in cells]

    monkeypatch.setattr(checks, "predict", predict)
    return noted


@pytest.mark.usefixtures("asked")
def test_the_nearest_of_three_anonymous_peaks_is_compared(tmp_path: Path) -> None:
    repeats = [
        replace(
            MEASURED,
            cell=replace(CELL, repeat=number),
            peaks=replace(MEASURED.peaks, anon_sampled_bytes=size),
        )
        for number, size in enumerate((900, 415, 1))
    ]
    (found,) = checks.check(run_of(tmp_path, *repeats))
    assert found.figures == (
        ("host_anon_most_bytes", 420, 415),
        ("host_file_peak_bytes", 80, 90),
        ("cuda_requested_bytes", 21, 20),
        ("cuda_allocated_bytes", 22, 2),
        ("cuda_reserved_bytes", 23, 3),
    )
    assert found.unreclaimable_bytes == 415
    assert found.anonymous_error == pytest.approx(5 / 415)
    assert not found.is_killed
    assert replace(found, unreclaimable_bytes=1001).is_killed
    assert not replace(found, unreclaimable_bytes=1000).is_killed
    assert not replace(found, unreclaimable_bytes=None).is_killed


@pytest.mark.usefixtures("asked")
def test_page_cache_of_ranks_and_figures_that_are_missing_are_not_compared(tmp_path: Path) -> None:
    several = replace(MEASURED, cell=replace(CELL, ranks=2))
    none = replace(
        MEASURED, cell=replace(CELL, strategy="baseline"), peaks=Peaks(anon_sampled_bytes=381)
    )
    of_ranks, of_none = checks.check(run_of(tmp_path, several, none))
    assert "host_file_peak_bytes" not in {name for name, *_ in of_ranks.figures}
    assert of_none.figures == (("host_anon_least_bytes", 380, 381),)
    assert of_none.unreclaimable_bytes == 381


@pytest.mark.usefixtures("asked")
def test_a_use_is_compared_with_its_own_peaks(tmp_path: Path) -> None:
    cell = replace(CELL, use="adamw")
    used = [
        replace(MEASURED, cell=replace(cell, repeat=number), use=Use(anon))
        for number, anon in enumerate((551, 590, 455))
    ]
    (found,) = checks.check(run_of(tmp_path, *used))
    assert found.figures[-1] == ("use_anon_least_bytes", 540, 551)
    assert found.unreclaimable_bytes == 590
    passes = replace(MEASURED, use=Use(460))  # without a prediction of them
    (found,) = checks.check(run_of(tmp_path / "passes", passes))
    assert not [name for name, *_ in found.figures if name.startswith("use_")]
