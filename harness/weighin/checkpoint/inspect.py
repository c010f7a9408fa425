"""List a checkpoint's tensors for ``weighin inspect``; read no tensor data, and import no torch."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from weighin import formats
from weighin.checkpoint.expected_memory import Expected, expected
from weighin.errors import UnknownName
from weighin.files import object_in
from weighin.formats import adapters, gguf, quantised
from weighin.formats.base import TensorSlice
from weighin.formats.misfit import first_names, plain
from weighin.formats.pretrained_folder import CONFIG, is_pretrained
from weighin.formats.pretrained_library import library_in
from weighin.formats.quantised import Quantised
from weighin.formats.selection import WHOLE, Selection
from weighin.formats.storages import Footprint, footprint, ties
from weighin.formats.tensor_refs import type_name
from weighin.suite import registry
from weighin.text import one_line
from weighin.units import format_bytes

SORTS: Final = ("file", "name", "size")
Item = TypeVar("Item")

_SHOWN_ROWS: Final = 20  # rows of a long table: half from its start, half from its end
_SHOWN_FILES: Final = 5


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint.

    Attributes:
        file: the path of the tensor's file, relative to the checkpoint's folder.
        offset: the distance in bytes from the file's start to the tensor's first element.
        shared_with: the name of the first tensor in the same storage; None for that tensor itself.
        tied_to: the name of the first tensor with the same elements in the file; None for itself.
        contiguous: whether the elements are stored in row-major order without gaps.
        encoding: the type in which a GGUF file stores the elements, "Q4_K"; None for ``dtype``.
        stored_bytes: the size of the elements in the file; equal to ``bytes`` without ``encoding``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    file: str
    offset: int
    shared_with: str | None
    tied_to: str | None
    contiguous: bool
    encoding: str | None
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Inspected:
    """A checkpoint's ``tensors`` in the state dict's order, and the (name, bytes) of its ``files``.

    Attributes:
        values: maps the names of the state dict's values that are no tensors to their types' names.
        quantised: how the tensors are quantised, if they are codes with scales; else None.
        adapter: a sentence about the adapter that lies beside the model; empty if there is none.
        architecture: the architecture that a GGUF file names; empty for other formats.
    """

    path: Path
    layout: str
    files: tuple[tuple[str, int], ...]
    tensors: tuple[Tensor, ...]
    expected: tuple[Expected, ...]
    footprint: Footprint
    values: Mapping[str, str]
    quantised: Quantised | None = None
    adapter: str = ""
    architecture: str = ""

    @property
    def once(self) -> list[Tensor]:
        """The tensors, except those that are tied to an earlier tensor."""
        return [tensor for tensor in self.tensors if tensor.tied_to is None]

    @property
    def shared(self) -> int:
        """The number of tensors that share a storage with an earlier tensor."""
        return sum(tensor.shared_with is not None for tensor in self.tensors)

    @property
    def numbers(self) -> int:
        """The number of elements of all tensors, with tied tensors counted once."""
        return sum(prod(tensor.shape) for tensor in self.once)

    @property
    def bytes(self) -> int:
        """The size of all tensors in bytes, with tied tensors counted once."""
        return sum(tensor.bytes for tensor in self.once)

    @property
    def stored_bytes(self) -> int:
        """The size of all tensors in the files, in bytes, with tied tensors counted once."""
        return sum(tensor.stored_bytes for tensor in self.once)

    @property
    def largest(self) -> Tensor:
        return max(self.tensors, key=lambda tensor: tensor.bytes)

    def as_json(self) -> dict[str, Any]:
        totals = {
            "tensors": len(self.tensors),
            "shared": self.shared,
            "numbers": self.numbers,
            "bytes": self.bytes,
            "storage_bytes": self.footprint.storage_bytes,
            "unused_bytes": self.footprint.unused_bytes,
            "stored_bytes": self.stored_bytes,
            "file_bytes": sum(size for _, size in self.files),
            "largest": self.largest.name,
        }
        return {
            "path": str(self.path),
            "layout": self.layout,
            "architecture": self.architecture or None,
            "files": [{"name": name, "bytes": size} for name, size in self.files],
            "totals": totals,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "values": [{"name": name, "type": kind} for name, kind in self.values.items()],
            "expected": [asdict(need) for need in self.expected],
            "quantised": asdict(self.quantised) if self.quantised else None,
            "adapter": self.adapter or None,
        }


def inspect(path: Path, selection: Selection = WHOLE) -> Inspected:
    """Describe a checkpoint of any format, without reading tensor data.

    Raises:
        CheckpointError: ``path`` is not a checkpoint, all its tensors are empty, or a file is
            damaged; for damage, the message names the file and the damaged place.
    """
    layout, slices = formats.read(path, selection)
    formats.refuse_empty(path, slices)
    root = path if path.is_dir() else path.parent
    tensors = tuple(_tensors(root, slices))
    files = tuple((_relative(file, root), file.stat().st_size) for file in formats.files(path))
    sizes = {tensor.name: tensor.bytes for tensor in tensors if tensor.tied_to is None}
    sized, values = footprint(slices), slices.values
    in_place = not selection and slices.only_tensors
    is_folder = is_pretrained(root)
    library = library_in(object_in(root / CONFIG)).name if is_folder else ""
    usable = [
        info
        for info in registry.strategies().values()
        if not info.needs_adapter and info.pretrained in ("", library)
    ]
    needs = expected(usable, layout, sizes, sized if in_place else None)
    kinds = {name: type_name(value) for name, value in values.items()}
    return Inspected(
        path, layout, files, tensors, tuple(needs), sized, kinds,
        quantised.in_checkpoint(path, slices), adapters.note(root),
        gguf.architecture(path) if layout == gguf.NAME else "",
    )  # fmt: skip


def tables(
    inspected: Inspected, *, sort: str = "file", show_all: bool = False
) -> list[Table | str]:
    """Return the tables and lines that ``weighin inspect`` prints.

    Raises:
        UnknownName: ``sort`` is not one of SORTS.
    """
    tensors = in_order(
        inspected.tensors, sort, lambda tensor: tensor.name, lambda tensor: tensor.bytes
    )
    return [
        _tensor_table(tensors, show_all),
        *_lines(inspected),
        *_notes(inspected),
        _expected_table(inspected),
        "The expected peaks are computed from sizes, not measured, and leave out the memory of"
        " `import torch`. weighin bench measures them.",
    ]


def _tensors(root: Path, slices: Sequence[TensorSlice]) -> Iterable[Tensor]:
    tied = ties(slices)
    firsts: dict[tuple[Path, int], str] = {}
    for place in slices:
        first = place.name
        if place.storage_bytes:  # the offset of an empty storage means nothing
            first = firsts.setdefault((place.file, place.storage_offset), place.name)
        yield Tensor(
            name=place.name,
            shape=place.shape,
            dtype=place.dtype_name,
            bytes=place.nbytes,
            file=_relative(place.file, root),
            offset=place.offset,
            shared_with=first if first != place.name else None,
            tied_to=tied.get(place.name),
            contiguous=place.contiguous,
            encoding=place.encoding or None,
            stored_bytes=place.storage_bytes if place.encoding else place.nbytes,
        )


def _relative(file: Path, root: Path) -> str:
    return str(file.relative_to(root)) if file.is_relative_to(root) else str(file)


def in_order(
    items: Sequence[Item], sort: str, name: Callable[[Item], str], size: Callable[[Item], int]
) -> list[Item]:
    """Return the items sorted by name or by size (the largest first); "file" keeps their order.

    Raises:
        UnknownName: ``sort`` is not one of SORTS.
    """
    if sort not in SORTS:
        raise UnknownName("order of tensors", sort, SORTS)
    if sort == "size":
        return sorted(items, key=size, reverse=True)
    return sorted(items, key=name) if sort == "name" else list(items)


def _tensor_table(tensors: list[Tensor], show_all: bool) -> Table:
    sharing = any(tensor.shared_with for tensor in tensors)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("size", justify="right")
    encoded = any(tensor.encoding for tensor in tensors)
    if encoded:
        table.add_column("dequantised", justify="right")
    table.add_column("offset", justify="right")
    if sharing:
        table.add_column("shared with", overflow="fold")
    left_out = 0 if show_all else max(0, len(tensors) - _SHOWN_ROWS)
    half = (len(tensors) - left_out) // 2 if left_out else len(tensors)
    for number, tensor in enumerate(tensors):
        if left_out and number == half:
            table.add_row(f"[dim]... {left_out:,} more (--all)[/]")
        if number < half or number >= half + left_out:
            table.add_row(
                _shown(tensor.name),
                " x ".join(f"{size}" for size in tensor.shape) or "scalar",
                tensor.encoding or tensor.dtype,
                format_bytes(tensor.stored_bytes),
                *([format_bytes(tensor.bytes) if tensor.encoding else ""] if encoded else []),
                f"{tensor.offset:,}",
                *([_shown(tensor.shared_with or "")] if sharing else []),
            )
    return table


def _lines(inspected: Inspected) -> list[str]:
    files = [f"{name} ({format_bytes(size)})" for name, size in inspected.files[:_SHOWN_FILES]]
    more = len(inspected.files) - len(files)
    shared = inspected.shared
    strided = sum(not tensor.contiguous for tensor in inspected.tensors)
    notes = [f"{shared} sharing a storage with an earlier one"] if shared else []
    notes += [f"{strided} not contiguous"] if strided else []
    count = f"{len(inspected.tensors)} tensors" + (f" ({', '.join(notes)})" if notes else "")
    return [
        f"{one_line(str(inspected.path))}: format {inspected.layout}, {count}, {inspected.numbers:,} elements"
        f" (parameters and buffers), {format_bytes(inspected.bytes)}",
        *_lines_of_encoding(inspected),
        f"largest: {one_line(inspected.largest.name, 100)}, {format_bytes(inspected.largest.bytes)}",
        f"files: {one_line(', '.join(files))}" + (f" and {more} more" if more > 0 else ""),
    ]


def _notes(inspected: Inspected) -> list[str]:
    """Return notes on everything that distinguishes the checkpoint from a plain dict of tensors."""
    sized, notes = inspected.footprint, []
    if sized.unused_bytes:
        notes.append(
            f"{format_bytes(sized.unused_bytes)} of the files belong to no tensor, and torch.load reads them"
            " too: torch.save writes the whole storage of a slice. Write the tensors alone: weighin convert"
            f" {one_line(str(inspected.path))} NEW.safetensors; or save slice.clone()"
        )
    if sized.repeated:
        notes.append(
            f"repeated (expanded) elements: {first_names(map(plain, sized.repeated))}; the storages have"
            f" {format_bytes(sized.storage_bytes)}, a model has {format_bytes(sized.tensor_bytes)}"
        )
    if inspected.values:
        kinds = (f"{plain(name)} ({kind})" for name, kind in inspected.values.items())
        notes.append(f"left out, because they are no tensors: {one_line(first_names(kinds))}")
    if inspected.adapter:
        notes.append(inspected.adapter)
    if found := inspected.quantised:
        notes.append(found.summary)
        notes.append(
            f"{found.obstacle}; {found.repair}"
            if found.obstacle
            else f"{found.loaders} (needs {found.needed}); the peaks below are of a model that takes"
            " the codes and the scales as they are"
        )
    return notes


def _lines_of_encoding(inspected: Inspected) -> list[str]:
    lines = [f"architecture: {one_line(inspected.architecture)}"] if inspected.architecture else []
    if any(tensor.encoding for tensor in inspected.tensors):
        types = Counter(tensor.encoding or tensor.dtype for tensor in inspected.tensors)
        counts = ", ".join(f"{name} ({count})" for name, count in types.most_common())
        lines.append(
            f"quantised: {counts}; {format_bytes(inspected.stored_bytes)} as stored,"
            f" {format_bytes(inspected.bytes)} dequantised"
        )
    return lines


def _expected_table(inspected: Inspected) -> Table:
    table = Table("strategy", "reads this format", box=SIMPLE_HEAD, pad_edge=False)
    table.title = "expected peak of a load on the CPU"
    table.add_column("anonymous", justify="right")
    table.add_column("file-backed", justify="right")
    order = sorted(inspected.expected, key=lambda need: inspected.layout not in need.layouts)
    for need in order:
        reads = inspected.layout in need.layouts
        other = f"no: use --format {need.layouts[0]}"
        sizes = (need.anonymous_bytes, need.mapped_bytes)
        table.add_row(
            escape(need.strategy),
            "yes" if reads else other,
            *("-" if size is None else format_bytes(size) for size in sizes),
        )
    return table


def _shown(name: str) -> str:
    return escape(one_line(name, 100))
