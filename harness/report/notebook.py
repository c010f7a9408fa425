"""The notebook's published figures beside ours: for runs of configs/suites/notebook.yaml."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import yaml
from pydantic import BaseModel, ConfigDict
from rich.console import Group, RenderableType
from rich.text import Text

from harness.record import Outcome, Result
from harness.registry import data_folder, model
from harness.units import GIB

HEADINGS: Final = (
    "method", "strategy", "GPU published GiB", "GPU GiB", "host published GiB",
    "host: peak RSS above import GiB", "anonymous (sampled) GiB", "file-backed (sampled) GiB",
)  # fmt: skip


class Method(BaseModel):
    """One line of the published table. ``phase`` is the phase that it is the peak of, if not all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    strategy: str
    phase: str | None = None
    gpu_gib: float
    host_gib: float | None
    host_why: str


class Published(BaseModel):
    """The published table, and the model that it is of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    methods: tuple[Method, ...]


@dataclass(frozen=True, slots=True)
class Ours:
    """What we have for one method, in bytes; None where we have nothing."""

    gpu_allocated_bytes: int | None
    host_above_import_bytes: int | None = None
    anon_bytes: int | None = None
    file_bytes: int | None = None


def published() -> Published:
    """Return the published figures."""
    path = data_folder("configs") / "published" / "notebook.yaml"
    return Published.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def are_there(results: Sequence[Result]) -> bool:
    """Tell whether some cell is one of the notebook's methods."""
    table = published()
    return any(_is_notebooks(one, table) for one in results)


def terminal_notebook(results: Sequence[Result]) -> RenderableType:
    """Return why our figures differ from the published ones, a line a method."""
    return Group(*(Text(f"{name}: {what}") for name, what in _differences(_rows(results))))


def markdown_notebook(results: Sequence[Result]) -> str:
    """Return the published table with our figures beside it, and why each differs."""
    return "\n".join(_section(results))


def _rows(results: Sequence[Result]) -> list[tuple[Method, Ours]]:
    table = published()
    found = {one.cell.strategy: one for one in results if _is_notebooks(one, table)}
    return [(method, _measured(method, found.get(method.strategy))) for method in table.methods]


def _section(results: Sequence[Result]) -> Iterator[str]:
    rows = _rows(results)
    yield from (
        "It prints GB for GiB. GPU: the allocator's peak of allocated bytes, exact in both. Host: the"
        " notebook looked at RSS every 0.1 s from a thread of the same process, in which all methods"
        " ran one after the other; ours is the kernel's own mark, of a fresh process for each.", "",
    )  # fmt: skip
    yield from lines(rows)
    yield ""
    yield from (f"- **{name}**: {what}" for name, what in _differences(rows))


def lines(rows: Sequence[tuple[Method, Ours]]) -> Iterator[str]:
    """Yield the table in markdown."""
    yield f"| {' | '.join(HEADINGS)} |"
    yield "| --- | --- |" + " ---: |" * (len(HEADINGS) - 2)
    for method, ours in rows:
        cells = [
            method.method,
            method.strategy + (f", phase {method.phase}" if method.phase else ""),
            f"{method.gpu_gib:.1f}",
            _both(ours.gpu_allocated_bytes),
            "-" if method.host_gib is None else f"{method.host_gib:.1f}",
            *map(_gib, (ours.host_above_import_bytes, ours.anon_bytes, ours.file_bytes)),
        ]
        yield f"| {' | '.join(cells)} |"


def _is_notebooks(result: Result, table: Published) -> bool:
    cell, wanted = result.cell, model(table.model)
    return (
        (cell.model.builder, cell.model.kwargs) == (wanted.builder, wanted.kwargs)
        and cell.device.startswith("cuda")
        and (cell.dtype, cell.options) == ("float32", {})
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


def _differences(rows: Sequence[tuple[Method, Ours]]) -> Iterator[tuple[str, str]]:
    for method, ours in rows:
        if ours.gpu_allocated_bytes is None:
            yield method.method, "nothing was measured."
            continue
        same = f"{ours.gpu_allocated_bytes / GIB:.1f}" == f"{method.gpu_gib:.1f}"
        gpu = "equal to the printed digit" if same else "differs from the published figure"
        yield method.method, f"GPU {gpu}. Host: {method.host_why}."


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.3f}"


def _both(size: int | None) -> str:
    """Return a size as the notebook prints it, and with our digits."""
    return "-" if size is None else f"{size / GIB:.1f} ({size / GIB:.3f})"
