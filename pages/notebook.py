"""Compare the figures that a notebook published with a run of configs/suites/notebook.yaml on a GPU.

    python -m pages.notebook RUN

The command prints the comparison as Markdown. ``markdown_predicted`` compares the published GPU figures with
predicted figures instead, which need no GPU.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml
from pydantic import BaseModel, ConfigDict

from weighin.cell import Cell, ModelSpec
from weighin.predict.client import predict
from weighin.predict.prediction import PredictedPhase, Prediction
from weighin.records import run_folder
from weighin.report import captions
from weighin.report.markdown import scaled, table_lines
from weighin.report.rows import series
from weighin.result import Outcome, Result
from weighin.suite.matrix import Planned
from weighin.suite.registry import model, strategy
from weighin.text import markdown as escaped
from weighin.units import GIB

ABOUT: Final = (
    "The notebook prints GiB as GB. GPU: the allocator's peak of allocated bytes, exact in both. Host:"
    " the notebook sampled RSS every 0.1 s from a thread of the process in which all methods ran one"
    " after the other; ours is the kernel's peak RSS of a fresh process for each method."
)
_NAMES: Final = 2
_HEADINGS: Final = (
    "method", "strategy", "GPU published GiB", "GPU GiB", "host published GiB",
    "host: peak RSS above import GiB", "anonymous (sampled) GiB", "file-backed (sampled) GiB",
)  # fmt: skip
_PREDICTED: Final = (
    "method", "strategy", "published, GB", "predicted: allocated GiB", "requested GiB",
    "reserved GiB",
)  # fmt: skip
CAPTION: Final = "Predicted with the current code each time these pages are generated."


class Method(BaseModel):
    """One line of the notebook's table; ``phase`` is None unless the figure is the peak of one phase."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    strategy: str
    phase: str | None = None
    gpu_gib: float
    host_gib: float | None
    host_why: str


class Published(BaseModel):
    """The table that the notebook published, and the name of the measured model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    methods: tuple[Method, ...]


@dataclass(frozen=True, slots=True)
class Ours:
    """The measured figures for one method, in bytes; None if not measured."""

    gpu_allocated_bytes: int | None
    host_above_import_bytes: int | None = None
    anon_bytes: int | None = None
    file_bytes: int | None = None


def published() -> Published:
    """Return the notebook's published figures."""
    path = Path(__file__).with_suffix(".yaml")
    return Published.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def markdown_notebook(results: Sequence[Result]) -> str:
    """Return the published table beside measured figures, with the reasons for differences, as Markdown."""
    reasons = [f"- **{name}**: {reason}" for name, reason in differences(results)]
    caption = escaped(captions.shared(series(results), results))
    lines = [
        ABOUT,
        "",
        *table_lines(_HEADINGS, rows(results), names=_NAMES),
        "",
        *reasons,
        "",
        caption,
    ]
    return "\n".join(lines)


def _rows(results: Sequence[Result]) -> list[tuple[Method, Ours]]:
    table = published()
    wanted = model(table.model)
    cells = {one.cell.strategy: one for one in results if _is_notebooks(one, table, wanted)}
    return [(method, _measured(method, cells.get(method.strategy))) for method in table.methods]


def rows(results: Sequence[Result]) -> Iterator[list[str]]:
    """Yield a row for each method, with its published figures and its measured figures."""
    for method, ours in _rows(results):
        yield [
            *_words(method),
            f"{method.gpu_gib:.1f}",
            _both(ours.gpu_allocated_bytes),
            "-" if method.host_gib is None else f"{method.host_gib:.1f}",
            *map(_gib, (ours.host_above_import_bytes, ours.anon_bytes, ours.file_bytes)),
        ]


def differences(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Yield each method, and the reason why its measured figures differ from the published ones."""
    for method, ours in _rows(results):
        if ours.gpu_allocated_bytes is None:
            yield method.method, "not measured."
            continue
        same = f"{ours.gpu_allocated_bytes / GIB:.1f}" == f"{method.gpu_gib:.1f}"
        gpu = "equal to all published digits" if same else "differs from the published figure"
        yield method.method, f"GPU: {gpu}. Host: {method.host_why}."


def _is_notebooks(result: Result, table: Published, wanted: ModelSpec) -> bool:
    cell = result.cell
    return (
        (cell.model.builder, cell.model.kwargs) == (wanted.builder, wanted.kwargs)
        and cell.device.startswith("cuda")
        and (cell.dtype, cell.options, cell.environment) == ("float32", {}, {})
        and cell.strategy in {method.strategy for method in table.methods}
    )


def _measured(method: Method, result: Result | None) -> Ours:
    if result is None:
        return Ours(None)
    if method.phase:
        phases = [one for one in result.phases if one.name == method.phase]
        return Ours(phases[0].peak_cuda_allocated_bytes if phases else None)
    if result.outcome is not Outcome.OK:
        return Ours(None)
    peaks, baseline = result.peaks, result.baseline
    above = None
    if peaks.rss_bytes is not None and baseline is not None:
        above = peaks.rss_bytes - baseline.rss_bytes
    return Ours(
        peaks.cuda_allocated_bytes, above, peaks.anon_sampled_bytes, peaks.file_sampled_bytes
    )


def _words(method: Method) -> tuple[str, str]:
    """Return the description of a method, and its strategy with the phase."""
    return method.method, method.strategy + (f", phase {method.phase}" if method.phase else "")


def _gib(size: int | None) -> str:
    return scaled(size, GIB, 3)


def _both(size: int | None) -> str:
    """Return a size in GiB with one digit, as the notebook prints it, and then with three digits."""
    return "-" if size is None else f"{size / GIB:.1f} ({size / GIB:.3f})"


def markdown_predicted() -> str:
    """Return the published table with predicted CUDA peaks, which takes 10 s."""
    table = published()
    predictions = {one.strategy: one for one in predict([*_planned(table)])}
    rows = [
        [*_words(method), f"{method.gpu_gib:.1f}", *_peaks(method, predictions[method.strategy])]
        for method in table.methods
    ]
    return "\n".join([*table_lines(_PREDICTED, rows, names=_NAMES), "", CAPTION])


def _planned(table: Published) -> Iterator[Planned]:
    spec = model(table.model)
    for name in dict.fromkeys(method.strategy for method in table.methods):
        info = strategy(name)
        cell = Cell(spec, name, "process", device="cuda", format=info.formats[0])
        yield Planned.of(cell, info)


def _peaks(method: Method, prediction: Prediction) -> list[str]:
    """Return the predicted CUDA peaks of a load or of one of its phases; "-" without a prediction."""
    phases = [phase for phase in prediction.phases if phase.name == method.phase]
    owners: Sequence[Prediction | PredictedPhase] = phases if method.phase else [prediction]
    kinds = ("allocated", "requested", "reserved")
    return [
        _gib(next((getattr(one, f"cuda_{kind}_bytes") for one in owners), None)) for kind in kinds
    ]


if __name__ == "__main__":
    print(markdown_notebook(run_folder.read(Path(sys.argv[1])).results))
