"""Compare the GPU figures that a notebook published with predicted figures, which need no GPU."""

from collections.abc import Iterator, Sequence
from typing import Final

from pages.notebook import NAMES, Method, Published, gib, method_words, published
from weighin.cell import Cell
from weighin.predict.client import predict
from weighin.predict.prediction import PredictedPhase, Prediction
from weighin.report.markdown import table_lines
from weighin.suite import registry
from weighin.suite.matrix import Planned

HEADINGS: Final = (
    "method", "strategy", "published, GB", "predicted: allocated GiB", "requested GiB",
    "reserved GiB",
)  # fmt: skip
CAPTION: Final = "Predicted with the current code each time these pages are generated."


def markdown_predicted() -> str:
    """Return the published table with predicted CUDA peaks, which takes 10 s."""
    table = published()
    return "\n".join([*lines(table, predict([*_planned(table)])), "", CAPTION])


def lines(table: Published, predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield the lines of the table in Markdown; a method that cannot be predicted has no figures."""
    of = {prediction.strategy: prediction for prediction in predictions}
    rows = [_row(method, _peaks(method, of[method.strategy])) for method in table.methods]
    return table_lines(HEADINGS, rows, names=NAMES)


def _row(method: Method, peaks: Prediction | PredictedPhase | None) -> list[str]:
    sizes: list[int | None] = [
        getattr(peaks, f"cuda_{kind}_bytes") if peaks else None
        for kind in ("allocated", "requested", "reserved")
    ]
    return [*method_words(method), f"{method.gpu_gib:.1f}", *map(gib, sizes)]


def _planned(table: Published) -> Iterator[Planned]:
    spec = registry.model(table.model)
    for name in dict.fromkeys(method.strategy for method in table.methods):
        info = registry.strategy(name)
        cell = Cell(spec, name, "process", device="cuda", format=info.formats[0])
        yield Planned.of(cell, info)


def _peaks(method: Method, prediction: Prediction) -> Prediction | PredictedPhase | None:
    if method.phase is None:
        return prediction
    return next((phase for phase in prediction.phases if phase.name == method.phase), None)
