"""Describe a pipeline of diffusers for ``weighin inspect``: its parts, and the size of each."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from weighin.checkpoint.inspect import Inspected, in_order, inspect
from weighin.errors import HarnessError
from weighin.formats import pipeline
from weighin.formats.pipeline import Part, Pipeline
from weighin.text import one_line
from weighin.units import format_bytes

_TOTALS: Final = ("tensors", "shared", "numbers", "bytes", "file_bytes")


@dataclass(frozen=True, slots=True)
class InspectedPart:
    """A part with weights. If the weights cannot be read, ``checkpoint`` is None and ``error`` is set."""

    part: Part
    checkpoint: Inspected | None
    error: str = ""

    @property
    def dtypes(self) -> str:
        """The dtypes of the tensors, the most frequent first; empty if they cannot be read."""
        names = [each.dtype for each in self.checkpoint.tensors] if self.checkpoint else []
        return ", ".join(sorted(dict.fromkeys(names), key=names.count, reverse=True))

    @property
    def bytes(self) -> int:
        """The size of all tensors in bytes; 0 if they cannot be read."""
        return self.checkpoint.bytes if self.checkpoint else 0

    def as_json(self) -> dict[str, Any]:
        """Return the fields for ``--json``, without the tensors."""
        described = self.checkpoint.as_json() if self.checkpoint else {}
        return {
            "name": self.part.name,
            "library": self.part.library,
            "class": self.part.class_name,
            "path": str(self.part.path),
            **{key: described.get(key) for key in ("layout", "files", "totals")},
            "error": self.error or None,
        }


@dataclass(frozen=True, slots=True)
class InspectedPipeline:
    """A pipeline, and its parts that have weights."""

    pipeline: Pipeline
    parts: tuple[InspectedPart, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields for ``--json``; ``totals`` are sums over the parts that can be read."""
        parts = [each.as_json() for each in self.parts]
        totals = [each["totals"] for each in parts if each["totals"]]
        return {
            "path": str(self.pipeline.path),
            "pipeline": self.pipeline.class_name,
            "parts": parts,
            "without_weights": [part.name for part in self.pipeline.without_weights],
            "missing": [part.name for part in self.pipeline.missing],
            "totals": {key: sum(each[key] for each in totals) for key in _TOTALS},
        }


def inspect_pipeline(path: Path) -> InspectedPipeline:
    """Describe the pipeline in a folder, without reading tensor data.

    A part that cannot be read gets an ``error``. A folder without weights gives no parts.
    """
    found = pipeline.read(path)
    return InspectedPipeline(found, tuple(_inspected(part) for part in found.models))


def _inspected(part: Part) -> InspectedPart:
    try:
        return InspectedPart(part, inspect(part.path))
    except HarnessError as error:
        return InspectedPart(part, None, one_line(f"{error.message}. {error.repair}"))


def tables(inspected: InspectedPipeline, *, sort: str = "file") -> list[Table | str]:
    """Return the table and the lines that ``weighin inspect`` prints for a pipeline.

    Raises:
        UnknownName: ``sort`` is not one of SORTS.
    """
    found = inspected.pipeline
    parts = in_order(inspected.parts, sort, lambda each: each.part.name, lambda each: each.bytes)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("part", "class", "format", "dtype"):
        table.add_column(heading, overflow="fold")
    table.add_column("tensors", justify="right")
    table.add_column("size", justify="right")
    for each in parts:
        read = each.checkpoint
        table.add_row(
            escape(one_line(each.part.name)),
            escape(one_line(each.part.class_name)),
            read.layout if read else "not read",
            each.dtypes,
            f"{len(read.tensors)}" if read else "-",
            format_bytes(each.bytes) if read else "-",
        )
    largest = found.largest
    total = sum(each.bytes for each in parts)
    lines = [
        f"{one_line(str(found.path))}: a pipeline of diffusers"
        + (f", {one_line(found.class_name)}" if found.class_name else "")
        + f", {len(parts)} models, {format_bytes(total)}",
        *(f"{each.part.name} is not read: {each.error}" for each in parts if each.error),
    ]
    for what, named in (
        ("without weights", found.without_weights),
        ("named in model_index.json, but not in the folder", found.missing),
    ):
        if named:
            lines.append(f"{what}: {one_line(', '.join(part.name for part in named))}")
    lines.append(
        f"Each part is a model of its own: weighin inspect {quote(str(largest.path))}. weighin predict"
        " and recommend take the whole pipeline."
    )
    return [table, *lines]
