"""Compare the figures that a notebook published with predictions and with a run on a GPU.

    python -m pages.notebook RUN

The command prints the comparison of a run of configs/suites/notebook.yaml as Markdown, with the
reason for each difference of the host's figures.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml
from pydantic import BaseModel, ConfigDict

from weighin.cell import Cell, ModelSpec
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned
from weighin.predict.client import predict
from weighin.predict.prediction import PredictedPhase, Prediction
from weighin.records import run_folder
from weighin.records.run import Measured
from weighin.result import Outcome, Result
from weighin.show import words
from weighin.show.table import Table
from weighin.show.words import scaled
from weighin.suite.registry import model, strategy
from weighin.text import markdown as escaped
from weighin.units import GIB

ABOUT: Final = (
    "GPU: the exact peak of allocated bytes. Host: the notebook sampled RSS every 0.1 s in one process"
    " for all methods; weighin's peak RSS is the kernel's, of a new process for each method."
)
_NAMES: Final = 2
_HEADINGS: Final = (
    "method", "strategy", "GPU published GB", "measured GiB", "predicted GiB", "host published GB",
    "host: peak RSS above import GiB", "anonymous (sampled) GiB",
)  # fmt: skip


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


def published() -> Published:
    """Return the notebook's published figures."""
    path = Path(__file__).with_suffix(".yaml")
    return Published.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def markdown_notebook(results: Sequence[Result]) -> str:
    """Return the published table beside measured and predicted figures, as Markdown; takes 10 s."""
    caption = escaped(words.shared(Measured(results)))
    return "\n".join(
        [Table.of(_HEADINGS, rows(results), names=_NAMES).markdown(), "", ABOUT, "", caption]
    )


def _rows(results: Sequence[Result]) -> list[tuple[Method, Ours]]:
    table = published()
    wanted = model(table.model)
    cells = {one.cell.strategy: one for one in results if _is_notebooks(one, table, wanted)}
    return [(method, _measured(method, cells.get(method.strategy))) for method in table.methods]


def rows(results: Sequence[Result]) -> Iterator[list[str]]:
    """Yield a row for each method, with its published, measured and predicted figures."""
    predictions = {one.strategy: one for one in predict([*_planned(published())])}
    for method, ours in _rows(results):
        yield [
            *_words(method),
            f"{method.gpu_gib:.1f}",
            _gib(ours.gpu_allocated_bytes),
            _gib(_predicted(method, predictions[method.strategy])),
            "-" if method.host_gib is None else f"{method.host_gib:.1f}",
            *map(_gib, (ours.host_above_import_bytes, ours.anon_bytes)),
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
    return Ours(peaks.cuda_allocated_bytes, above, peaks.anon_sampled_bytes)


def _words(method: Method) -> tuple[str, str]:
    """Return the description of a method, and its strategy with the phase."""
    return method.method, method.strategy + (f", phase {method.phase}" if method.phase else "")


def _gib(size: int | None) -> str:
    return scaled(size, GIB, 3)


def _planned(table: Published) -> Iterator[Planned]:
    spec = model(table.model)
    for name in dict.fromkeys(method.strategy for method in table.methods):
        info = strategy(name)
        cell = Cell(spec, name, "process", device="cuda", format=info.formats[0])
        yield plan_cell(cell, info)


def _predicted(method: Method, prediction: Prediction) -> int | None:
    """Return the predicted peak of allocated bytes of a load or of one of its phases."""
    phases = [phase for phase in prediction.phases if phase.name == method.phase]
    owners: Sequence[Prediction | PredictedPhase] = phases if method.phase else [prediction]
    return owners[0].cuda_allocated_bytes if owners else None


def main() -> None:
    results = run_folder.read(Path(sys.argv[1])).results
    print(markdown_notebook(results), "", sep="\n")
    for name, reason in differences(results):
        print(f"- **{name}**: {reason}")


if __name__ == "__main__":
    main()
