"""The notebook's published figures beside those of a run on a GPU."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_cell, make_result

from pages import notebook
from weighin.plan.task import Planned
from weighin.predict.prediction import PredictedPhase, Prediction
from weighin.records import run_folder
from weighin.result import Memory, Outcome, Peaks, Phase, Result
from weighin.settings.definition import read_suite
from weighin.suite.registry import data_folder, model
from weighin.units import GIB, MIB

LIMITLESS = {"ram_limit_bytes": None, "device": "cuda"}


def gpu_cell(strategy: str, gpu_gib: float, **changes: object) -> Result:
    cell = make_cell(strategy, model=model("gpt2-xl"), **LIMITLESS)
    baseline = Memory(200 * MIB, 100 * MIB, 100 * MIB, 0)
    peaks = Peaks(
        rss_bytes=200 * MIB + GIB,
        anon_sampled_bytes=GIB // 2,
        file_sampled_bytes=GIB // 4,
        cuda_allocated_bytes=round(gpu_gib * GIB),
    )
    build = Phase("build", 0, 1, 2, baseline, 3, 4, peak_cuda_allocated_bytes=round(6.416 * GIB))
    changes = {"peaks": peaks, "baseline": baseline, "phases": (build,)} | changes
    return replace(make_result(cell, outcome=Outcome.OK), **changes)  # type: ignore[arg-type]


def test_the_suite_has_the_published_methods_in_their_order() -> None:
    suite = read_suite(data_folder("configs") / "suites" / "notebook.yaml")
    table = notebook.published()
    assert [model.source for model in suite.models] == [table.model]
    assert suite.device == "cuda"
    strategies = list(dict.fromkeys(method.strategy for method in table.methods))
    assert [one.name for one in suite.strategies] == strategies
    assert [method.gpu_gib for method in table.methods] == [6.4, 12.8, 6.7, 12.8, 6.4, 6.4]
    assert [method.host_gib for method in table.methods] == [None, 4.4, 6.3, 1.3, 5.9, 0.3]


def foretold(planned: Sequence[Planned]) -> list[Prediction]:
    """Predictions of 6.5 GiB, 2 GiB after the phase "build", and none of per_param."""
    assert {(one.cell.model.name, one.cell.device) for one in planned} == {("gpt2-xl", "cuda")}
    build = PredictedPhase(
        "build", cuda_requested_bytes=GIB, cuda_allocated_bytes=2 * GIB, cuda_reserved_bytes=3 * GIB
    )
    return [
        Prediction(one.cell, cannot="ValueError: odd")
        if one.cell.strategy == "per_param"
        else Prediction(one.cell, phases=(build,), cuda_allocated_bytes=13 * GIB // 2)
        for one in planned
    ]


def test_each_method_stands_beside_what_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "predict", foretold)
    results = [gpu_cell("baseline", 12.832), gpu_cell("sequential", 6.416)]
    text = notebook.markdown_notebook(results).splitlines()
    assert text[1:8] == [
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| the model alone on the GPU | baseline, phase build | 6.4 | 6.416 | 2.000 | - | - | - |",
        "| model on the GPU, state dict on the GPU, load_state_dict | baseline | 12.8 | 12.832"
        " | 6.500 | 4.4 | 1.000 | 0.500 |",
        "| model on the GPU, state dict on the CPU, copied parameter by parameter | sequential | 6.7"
        " | 6.416 | 6.500 | 6.3 | 1.000 | 0.500 |",
        "| meta device, to_empty on the GPU, state dict on the GPU, copied | meta_copy | 12.8 | -"
        " | 6.500 | 1.3 | - | - |",
        "| meta device, state dict mapped to the GPU, assign | mmap_assign | 6.4 | - | 6.500 | 5.9"
        " | - | - |",
        "| meta device, to_empty on the GPU, one file for each parameter | per_param | 6.4 | - | - | 0.3"
        " | - | - |",
    ]
    assert [*notebook.differences(results)][:4] == [
        (
            "the model alone on the GPU",
            "GPU: equal to all published digits. Host: not published.",
        ),
        (
            "model on the GPU, state dict on the GPU, load_state_dict",
            "GPU: equal to all published digits. Host: the model is built on the CPU first, and 4.4"
            " is less than its 6.3 GiB: samples every 0.1 s missed the peak.",
        ),
        (
            "model on the GPU, state dict on the CPU, copied parameter by parameter",
            "GPU: differs from the published figure. Host: the whole state dict; the model that was"
            " built in RAM before is as large, but was freed by then.",
        ),
        ("meta device, to_empty on the GPU, state dict on the GPU, copied", "not measured."),
    ]


def test_a_cell_that_failed_is_not_compared() -> None:
    compared = dict(notebook.differences([gpu_cell("mmap_assign", 1.0, outcome=Outcome.CUDA_OOM)]))
    assert compared["meta device, state dict mapped to the GPU, assign"] == "not measured."


def test_cells_that_are_not_the_notebooks_are_not_compared() -> None:
    cuda = gpu_cell("baseline", 1.0)
    others = [
        replace(cuda, cell=replace(cuda.cell, device="cpu")),
        replace(cuda, cell=replace(cuda.cell, dtype="bfloat16")),
        replace(cuda, cell=replace(cuda.cell, options={"map_location": "cpu"})),
        replace(cuda, cell=replace(cuda.cell, model=model("gpt2-small"))),
        replace(cuda, cell=replace(cuda.cell, strategy="streaming")),
    ]
    for one in others:
        assert {why for _, why in notebook.differences([one])} == {"not measured."}


def test_the_module_prints_the_comparison_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder.append(tmp_path, gpu_cell("baseline", 12.832))
    monkeypatch.setattr(notebook, "predict", foretold)
    monkeypatch.setattr(sys, "argv", ["pages.notebook", str(tmp_path)])
    notebook.main()
    table, _, reasons = capsys.readouterr().out.partition("\n\n- **")
    assert "| baseline | 12.8 | 12.832 | 6.500 |" in table
    assert reasons.count("not measured.") == len(notebook.published().methods) - 2
