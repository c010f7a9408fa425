"""Compare the figures that a notebook published with predictions and with a run on a GPU.

``notebook.yaml`` has the published figures, with the reason for each difference of the host's figures from
those of a run of configs/suites/notebook.yaml.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from pages.run_tables import caption
from weighin.cell import Cell, ModelSpec
from weighin.plan.loads import plan_cell
from weighin.predict.client import predict
from weighin.records.series import Measured
from weighin.result import Outcome, Result
from weighin.show.table import Table
from weighin.show.words import scaled
from weighin.suite.registry import model, strategy
from weighin.units import GIB

ABOUT: Final = (
    "GPU: the exact peak of allocated bytes. Host: the notebook sampled RSS every 0.1 s, in one process for all"
    " methods. weighin starts a process for each method, and reports the kernel's own peak of RSS."
)
_USUAL: Final = re.compile(
    r"device cuda|no RAM limit|float32|cold page cache|x86_64|Intel.*|Linux .*|cgroup v2"
)
"""What the caption leaves out: the page says it, or it is so in all runs."""
_HEADINGS: Final = (
    "method", "strategy", "GPU published GB", "measured GiB", "predicted GiB", "host published GB",
    "peak RSS above import GiB", "anonymous (sampled) GiB",
)  # fmt: skip


def markdown_notebook(results: Sequence[Result]) -> str:
    """Return the published table beside measured and predicted figures, as Markdown; takes 10 s."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    spec = model(table["model"])
    planned = []
    for name in dict.fromkeys(method["strategy"] for method in table["methods"]):
        info = strategy(name)
        cell = Cell(spec, name, "process", device="cuda", format=info.formats[0])
        planned.append(plan_cell(cell, info))
    predictions = {one.strategy: one for one in predict(planned)}
    measured = {one.cell.strategy: one for one in results if _is_notebooks(one.cell, spec)}
    rows = []
    for method in table["methods"]:
        name, phase = method["strategy"], method.get("phase")
        prediction, published = predictions[name], f"{method['gpu_gib']:.1f}"
        predicted_bytes = prediction.cuda_allocated_bytes
        if phase:
            phases = [one for one in prediction.phases if one.name == phase]
            predicted_bytes = phases[0].cuda_allocated_bytes if phases else None
        gpu_bytes, *host_bytes = _measured(phase, measured.get(name))
        gpu = (scaled(gpu_bytes, GIB, 3), scaled(predicted_bytes, GIB, 3))
        host = (scaled(method["host_gib"], 1, 1), *(scaled(size, GIB, 3) for size in host_bytes))
        label = name + (f", phase {phase}" if phase else "")
        rows.append([method["method"], label, published, *gpu, *host])
    about = caption(Measured(results), _USUAL)
    return f"{Table.of(_HEADINGS, rows, names=2).markdown()}\n\n{ABOUT}\n\n{about}"


def _is_notebooks(cell: Cell, spec: ModelSpec) -> bool:
    return (
        (cell.model.builder, cell.model.kwargs) == (spec.builder, spec.kwargs)
        and cell.device.startswith("cuda")
        and (cell.dtype, cell.options, cell.environment) == ("float32", {}, {})
    )


def _measured(
    phase: str | None, result: Result | None
) -> tuple[int | None, int | None, int | None]:
    """Return bytes allocated on the GPU, resident above the import, and anonymous; None if not measured."""
    if result and phase:
        phases = [one for one in result.phases if one.name == phase]
        return phases[0].peak_cuda_allocated_bytes if phases else None, None, None
    if result is None or result.outcome is not Outcome.OK:
        return None, None, None
    peaks, baseline = result.peaks, result.baseline
    above = None
    if peaks.rss_bytes is not None and baseline is not None:
        above = peaks.rss_bytes - baseline.rss_bytes
    return peaks.cuda_allocated_bytes, above, peaks.anon_sampled_bytes
