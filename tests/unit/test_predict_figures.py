"""What follows from the figures of a prediction: floors, sums, words, tables, and comparisons with a run."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import predicted_runs as checks
import pytest
import torch
from factories import make_cell, make_result, refused, run_of
from predicted_runs import Checked
from rich.console import Console
from snapshots import Compare

from weighin.cell import Cell
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned
from weighin.predict import client
from weighin.predict.prediction import (
    PredictedPhase,
    PredictedUse,
    Prediction,
    Work,
    from_json,
    reasons,
)
from weighin.predict.tables import tables
from weighin.result import Memory, Peaks, Use
from weighin.stream.pretrained_library import LIBRARIES, Selection
from weighin.stream.quantised import Quantised
from weighin.suite import registry
from weighin.units import GIB, MIB

CELL = make_cell("mmap_assign", ram_limit_bytes=None)
USE = PredictedUse(
    "adamw", 540, 690, 300, host_anon_peak_bytes=590, host_file_peak_bytes=70,
    cuda_requested_bytes=11, cuda_allocated_bytes=12, cuda_reserved_bytes=13,
)  # fmt: skip
READ = PredictedPhase(
    "read", host_anon_peak_bytes=30, host_file_peak_bytes=100,
    cuda_requested_bytes=3, cuda_allocated_bytes=4, cuda_reserved_bytes=5,
)  # fmt: skip
ONE = Prediction(
    CELL, model_bytes=100, baseline_anon_bytes=10, baseline_file_bytes=9,
    host_anon_peak_bytes=400, host_anon_least_bytes=380, host_anon_most_bytes=420,
    host_file_peak_bytes=80, tensor_peak_bytes=200, in_flight_bytes=7, floor_bytes=1000,
    cuda_requested_bytes=21, cuda_allocated_bytes=1,
)  # fmt: skip
WORK = Work(1, 2, 3, 4, 5, 6, 7, 8, 9)
SMALL = replace(USE, host_anon_least_bytes=1, host_anon_most_bytes=2)
UNKNOWN: dict[str, Any] = {"host_anon_least_bytes": None, "host_anon_most_bytes": None}
WHOLE = replace(ONE, use=USE, phases=(READ,), work=WORK, reasons=("maps one copy",))
FLOORS: dict[str, Prediction] = {
    "a load": ONE,
    "no floor": replace(ONE, floor_bytes=None),
    "a use that takes more": replace(ONE, use=USE),
    "a use that takes less": replace(ONE, use=SMALL),
    "the usual peak alone": replace(ONE, **UNKNOWN),
    "no peak": replace(ONE, **UNKNOWN, host_anon_peak_bytes=None),
    "no peak, and a use": replace(ONE, **UNKNOWN, host_anon_peak_bytes=None, use=USE),
}
OF_BOTH = (
    "tensor_peak_bytes", "cuda_requested_bytes", "cuda_allocated_bytes", "cuda_reserved_bytes",
)  # fmt: skip
TENSORS_MAPPED_CUDA: list[tuple[int, int, int | None]] = [
    (1000, 0, None), (2000, 0, 0), (3000, 0, None), (4000, 0, None), (970, 0, None), (969, 0, None),
    (1030, 0, None), (1031, 0, None), (500, 0, None), (499, 499, None), (0, 500, None), (499, 0, 2000),
    (1000, 1000, 1000),
]  # fmt: skip
"""Bytes beside a model of 1000."""
THREE = replace(CELL, ranks=3)
OF_RANKS = {
    "all figures of three ranks, which share mapped pages and nothing else": client.of_ranks(THREE, WHOLE),
    "of what is not known": client.of_ranks(THREE, Prediction(CELL, model_bytes=5)),
    "of what cannot be predicted": client.of_ranks(THREE, Prediction(CELL, cannot="why")),
}  # fmt: skip


def test_what_follows_from_the_figures(same: Compare) -> None:
    lines = ["the floor without what other processes keep, and how far it is above the peak"]
    lines += [
        f"  {what}: {one.floor_least_bytes}, {one.above_peak_bytes}" for what, one in FLOORS.items()
    ]
    lines.append("the higher peak of load and use")
    lines += [f"  {name}: {ONE.with_use(name)}, {WHOLE.with_use(name)}" for name in OF_BOTH]
    lines.append("a peak in copies of a model of 1000 bytes")
    for sizes in TENSORS_MAPPED_CUDA:
        lines.append(f"  {sizes}: {'; '.join(reasons(1000, *sizes))}")
    for what, one in OF_RANKS.items():
        assert one.cell == THREE
        lines += [what, json.dumps(asdict(one) | {"cell": ""}, indent=1)]
    same("figures.txt", "\n".join(lines) + "\n")
    assert client.of_ranks(CELL, ONE) == ONE


def test_a_prediction_comes_back_from_its_json() -> None:
    for one in (WHOLE, Prediction(CELL, cannot="odd")):
        fields = asdict(one)
        fields["reasons"] = list(fields["reasons"])
        assert from_json(CELL, fields | {"error": ["a", "b"]}) == one
    assert from_json(CELL, {"cannot": "killed"}) == Prediction(CELL, cannot="killed")
    assert from_json(CELL, {"work": {}}).work == Work(0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert WORK.disk_read_bytes == 1 + 2 + 3


# -- tables


def foretold(name: str, use: PredictedUse | None = None, **changes: Any) -> Prediction:
    """Return a prediction whose figures all differ."""
    cell = make_cell(name, **{"format": "pt"} | changes)
    sizes: dict[str, Any] = {
        "model_bytes": 131 * GIB, "host_anon_peak_bytes": GIB, "host_file_peak_bytes": 80 * MIB,
        "floor_bytes": 2 * GIB, "disk_read_bytes": 65 * GIB,
    }  # fmt: skip
    if cell.device == "cuda":
        kinds = ("requested", "allocated", "reserved")
        sizes |= {f"cuda_{kind}_bytes": (131 + more) * GIB for more, kind in enumerate(kinds)}
    return Prediction(cell, reasons=("keeps one copy of the weights",), use=use, **sizes)


ODD = Prediction(make_cell("odd", format="pt"), cannot="it looks at values")
SHOWN: dict[str, tuple[int, Sequence[Prediction]]] = {
    "nothing but a failure": (80, [ODD]),
    "two strategies for the same reason, and one that failed": (80, [
        foretold("safetensors_mmap", device="cuda", format="safetensors"),
        foretold("streaming", device="cuda", options={"threads": 2}),
        ODD,
    ]),
    "the same in a wide terminal": (160, [foretold("streaming", device="cuda")]),
    "a use, and several ranks": (
        80, [foretold("baseline", use=replace(USE, host_anon_peak_bytes=25 * GIB), ranks=2), foretold("sequential")],
    ),
    "a checkpoint of another dtype": (80, [replace(foretold("baseline"), checkpoint_dtype="bfloat16", reasons=(), model_bytes=None)]),
    "two models": (80, [foretold("streaming"), foretold("streaming", model=registry.model("gpt2-tiny")), ODD]),
}  # fmt: skip


def printed(parts: Any, width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def test_tables_of_predictions(same: Compare) -> None:
    texts = [f"# {what}\n{printed(tables(all_), width)}" for what, (width, all_) in SHOWN.items()]
    same("predicted.txt", "\n".join(texts))


# -- what is asked of the predicting process, and what is not


def planned(name: str = "streaming", **changes: Any) -> Planned:
    info = registry.strategy(name)
    cell = Cell(registry.model("gpt2-tiny"), name, "process", format=info.formats[0])
    return plan_cell(replace(cell, **changes), info)


CANNOT = "weighin cannot predict "


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (planned(environment={"MALLOC_ARENA_MAX": "1"}), f"{CANNOT}the effect of MALLOC_ARENA_MAX=1"),
        (planned(use="fork", passes=0), "the use fork can only be measured"),
        (replace(planned("transformers", format="gguf"), skip=""), f"{CANNOT}how transformers dequantises a GGUF file"),
        (replace(planned("baseline", format="gguf"), skip=""), f"{CANNOT}how baseline dequantises a GGUF file"),
        (planned("dcp_fsdp", ranks=2), f"{CANNOT}the memory of tensors that ranks send to each other"),
        (planned(options={"key": "model"}), f"{CANNOT}the load of a part of a training checkpoint"),
        (planned(options={"disable_mmap": True}), f"{CANNOT}which of the files' bytes disable_mmap keeps in memory"),
        (planned(options={"offload_state_dict": True}), f"{CANNOT}the memory of weights that are written to a folder and read back"),
        (replace(planned(), skip="needs a GPU"), "needs a GPU"),
        (Planned(planned().cell, replace(registry.strategy("streaming"), packages=("zlib_ng>=2", "numpy", "anyio"))),
         f"{CANNOT}how anyio, zlib_ng reads files"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)  # fmt: skip
def test_a_cell_that_is_not_followed_says_why(one: Planned, why: str) -> None:
    told: list[tuple[int, str]] = []
    (found,) = client.predict([one], report=lambda *step: told.append(step))
    assert found == Prediction(one.cell, cannot=why)
    assert told == [(0, one.cell.strategy)]


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the predicting process is asked; it answers that it cannot."""
    noted: list[dict[str, Any]] = []

    @contextmanager
    def process(_python_path: Sequence[str]) -> Iterator[Any]:
        def ask(cell: Cell, folder: str, **question: Any) -> dict[str, Any]:
            noted.append({"cell": cell, "folder": folder} | question)
            return {"cannot": "why"}

        yield ask, "made"

    monkeypatch.setattr(client, "_process", process)
    monkeypatch.setattr(client, "read_ahead_bytes", lambda _folder: 5)
    return noted


@pytest.mark.parametrize(
    ("name", "dequantises", "refusal"),
    [
        ("streaming", True, ""),
        ("streaming", False, f"{CANNOT}how streaming loads weights that are quantised with nf4"),
        ("transformers", True, f"{CANNOT}how transformers loads weights that are quantised with nf4"),
    ],
)  # fmt: skip
def test_quantised_weights_are_followed_where_weighin_dequantises_them(
    questions: list[dict[str, Any]], name: str, dequantises: bool, refusal: str
) -> None:
    found = Quantised("nf4", 1, 1, dequantises=dequantises)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weighin.predict.client.quantised.of_model", lambda _model: found)
        (one,) = client.predict([replace(planned(name), skip="")])
    assert one.cannot == (refusal or "why")
    assert len(questions) == (not refusal)


def test_what_the_predicting_process_is_asked(
    questions: list[dict[str, Any]], tmp_path: Path
) -> None:
    torch.save({"a": torch.ones(2)}, file := tmp_path / "model.pt")
    cells = [planned(ranks=2), planned(use="write", passes=0, format="safetensors")]
    asked = {
        "cell": replace(cells[0].cell, ranks=1), "folder": "made/0", "source": None,
        "strategy_path": str(registry.strategy("streaming").path), "use_path": "",
        "selection": {"key": "", "strip_prefix": ""}, "read_ahead_bytes": 5,
        "checks": False, "is_own": False, "forward": False,
    }  # fmt: skip
    found = client.predict(cells)
    assert [one.cell for one in found] == [one.cell for one in cells]
    assert questions == [asked, asked | {"cell": cells[1].cell, "folder": "made/1"}]

    questions.clear()
    client.predict(cells, checkpoint=file, forward=True, use_paths={"write": "w.py"})
    assert questions == [  # without a use of its own, a forward pass
        asked | {"source": str(file), "is_own": True, "forward": True},
        asked | {"cell": cells[1].cell, "folder": "made/1", "source": str(file), "use_path": "w.py"},
    ]  # fmt: skip

    questions.clear()  # the first load of a library's model compares it with the file
    model = replace(CELL.model, builder=LIBRARIES[0].builder)
    theirs = replace(cells[0], cell=replace(cells[0].cell, model=model))
    client.predict([theirs, theirs], checkpoint=file, selection=Selection("model"))
    assert [(one["checks"], one["is_own"]) for one in questions] == [(True, False), (False, False)]
    assert questions[0]["selection"] == {"key": "model", "strip_prefix": ""}
    questions.clear()
    client.predict([theirs])
    assert not questions[0]["checks"]


def test_a_misfit_is_the_users_error_and_a_killed_process_has_a_repair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Mapping[str, Any] | None] = [
        None, {"event": "answer", "misfit": ["the file lacks a", "name another"]},
    ]  # fmt: skip

    class Child:
        def __init__(self, *_: object) -> None:
            self.receive = answers.pop
            self.send = self.close = lambda *_, **__: None

    monkeypatch.setattr("weighin.child_process.Child", Child)
    assert refused(client.predict, [planned()]) == "the file lacks a\nname another"
    killed = refused(client.predict, [planned()])
    assert killed.startswith("weighin's process that computes the prediction was killed\nrun the")


# -- compared with a run

MEASURED = make_result(
    CELL,
    peaks=Peaks(
        anon_sampled_bytes=410, file_sampled_bytes=90, unreclaimable_sampled_bytes=415,
        cuda_requested_bytes=20, cuda_allocated_bytes=2, cuda_reserved_bytes=3,
    ),
    baseline=Memory(0, 0, 0, 0),
)  # fmt: skip


@pytest.fixture
def _predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(cells: list[Planned], **_: Any) -> list[Prediction]:
        use = USE if cells[0].cell.use else None
        return [replace(ONE, cell=one.cell, use=use, cuda_reserved_bytes=23) for one in cells]

    monkeypatch.setattr(checks, "predict", predict)


@pytest.mark.usefixtures("_predicted")
def test_predictions_are_compared_with_the_measured_peaks(tmp_path: Path) -> None:
    repeats = [
        replace(
            MEASURED, cell=replace(CELL, repeat=number),
            peaks=replace(MEASURED.peaks, anon_sampled_bytes=size),
        )
        for number, size in enumerate((900, 415, 1))
    ]  # fmt: skip
    several = replace(MEASURED, cell=replace(CELL, ranks=2))
    none = replace(MEASURED, cell=replace(CELL, strategy="baseline"))
    none = replace(none, peaks=Peaks(anon_sampled_bytes=381))
    (one, of_ranks, of_none) = checks.check(run_of(tmp_path, *repeats, several, none))
    assert one.figures == (
        ("host_anon_most_bytes", 420, 415),  # the nearest of three, to the median
        ("host_file_peak_bytes", 80, 90),
        ("cuda_requested_bytes", 21, 20),
        ("cuda_allocated_bytes", 1, 2),
        ("cuda_reserved_bytes", 23, 3),
    )
    assert (one.unreclaimable_bytes, one.is_killed) == (415, False)
    assert one.anonymous_error == pytest.approx(5 / 415)
    assert "host_file_peak_bytes" not in {name for name, *_ in of_ranks.figures}
    assert of_none.figures == (("host_anon_least_bytes", 380, 381),)
    assert of_none.unreclaimable_bytes == 381


@pytest.mark.usefixtures("_predicted")
def test_a_use_is_compared_with_its_own_peaks(tmp_path: Path) -> None:
    cell = replace(CELL, use="adamw")
    used = [
        replace(MEASURED, cell=replace(cell, repeat=number), use=Use(anon))
        for number, anon in enumerate((551, 590, 455))
    ]
    (found,) = checks.check(run_of(tmp_path, *used))
    assert found.figures[-1] == ("use_anon_least_bytes", 540, 551)
    assert found.unreclaimable_bytes == 590


def test_a_summary_counts_the_series_that_their_predicted_floor_would_kill() -> None:
    checked = [
        Checked(
            Prediction(make_cell("mmap_assign"), floor_bytes=120),
            (("host_anon_peak_bytes", predicted, 100), ("host_file_peak_bytes", 1, 2)),
            needed,
        )
        for predicted, needed in ((99, 100), (103, 121), (100, 120), (100, None))
    ]
    assert checks.summary_line([*checked, Checked(ODD, ())]) == (
        "4 series. Anonymous peak: median error 0.50%, largest 3.00%. A RAM limit of the predicted"
        " floor would have killed 1 (25.0%)."
    )
    assert (checks.summarised([Checked(ODD, ())]), checks.summary_line([])) == (None, "")
