"""List a checkpoint's tensors, or the parts of a pipeline, for ``weighin inspect``; read no tensor
data, and import no torch. Compute from the sizes how much memory each strategy should need.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any, Final, TypeVar

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from weighin.errors import HarnessError, UnknownName
from weighin.files import object_in
from weighin.formats import pipeline, quantised
from weighin.formats.pretrained_folder import CONFIG, adapter_note, is_pretrained
from weighin.formats.pretrained_library import WHOLE, Selection, library_in
from weighin.formats.quantised import Quantised
from weighin.stream import formats
from weighin.stream import gguf_files as gguf
from weighin.stream.folders import module_of
from weighin.stream.foreign import remembering
from weighin.stream.pickles import type_name
from weighin.stream.slices import Footprint, TensorSlice, footprint, ties
from weighin.suite import registry
from weighin.suite.registry import StrategyInfo
from weighin.text import first_names, one_line, plain
from weighin.units import format_bytes

SORTS: Final = ("file", "name", "size")
Item = TypeVar("Item")

_SHOWN_ROWS: Final = 20  # rows of a long table: half from its start, half from its end
_SHOWN_FILES: Final = 5
_SUMMED: Final = ("tensors", "shared", "numbers", "bytes", "file_bytes")  # over a pipeline's parts
SHARD_BYTES: Final = 5 * 1024**3  # the default size of a shard of weighin convert


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected memory of one strategy for one checkpoint.

    Attributes:
        layouts: the formats that the strategy reads.
        anonymous_bytes: the expected peak without ``import torch``; None for a strategy without PEAK.
        mapped_bytes: the size of the mapped file pages, which the kernel can reclaim; None likewise.
    """

    strategy: str
    layouts: tuple[str, ...]
    anonymous_bytes: int | None
    mapped_bytes: int | None


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
        totals: the numbers of tensors and elements, and sizes in bytes; tied tensors count once.
        values: maps the names of the state dict's values that are no tensors to their types' names.
        quantised: how the tensors are quantised, if they are codes with scales; else None.
        adapter: a sentence about the adapter that lies beside the model; empty if there is none.
        architecture: the architecture that a GGUF file names; empty for other formats.
    """

    path: Path
    layout: str
    files: tuple[tuple[str, int], ...]
    tensors: tuple[Tensor, ...]
    totals: Mapping[str, Any]
    expected: tuple[Expected, ...]
    footprint: Footprint
    values: Mapping[str, str]
    quantised: Quantised | None = None
    adapter: str = ""
    architecture: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "layout": self.layout,
            "architecture": self.architecture or None,
            "files": [{"name": name, "bytes": size} for name, size in self.files],
            "totals": dict(self.totals),
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "values": [{"name": name, "type": kind} for name, kind in self.values.items()],
            "expected": [asdict(need) for need in self.expected],
            "quantised": asdict(self.quantised) if self.quantised else None,
            "adapter": self.adapter or None,
        }


@remembering()
def inspect(path: Path, selection: Selection = WHOLE) -> Inspected:
    """Describe a checkpoint of any format, without reading tensor data.

    Raises:
        CheckpointError: ``path`` is not a checkpoint, all its tensors are empty, or a file is
            damaged; for damage, the message names the file and the damaged place.
    """
    slices = formats.read(path, selection)
    formats.refuse_empty(path, slices)
    root = path if path.is_dir() else path.parent
    tensors = tuple(_tensors(root, slices))
    files = tuple((_relative(file, root), file.stat().st_size) for file in slices.files)
    once = [tensor for tensor in tensors if tensor.tied_to is None]
    sized = footprint(slices)
    totals = {
        "tensors": len(tensors),
        "shared": sum(tensor.shared_with is not None for tensor in tensors),
        "numbers": sum(prod(tensor.shape) for tensor in once),
        "bytes": sum(tensor.bytes for tensor in once),
        "storage_bytes": sized.storage_bytes,
        "unused_bytes": sized.unused_bytes,
        "stored_bytes": sum(tensor.stored_bytes for tensor in once),
        "file_bytes": sum(size for _, size in files),
        "largest": max(tensors, key=lambda tensor: tensor.bytes).name,
    }
    library = library_in(object_in(root / CONFIG)).name if is_pretrained(root) else ""
    usable = [
        info
        for info in registry.strategies().values()
        if not info.needs_adapter and info.pretrained in ("", library)
    ]
    in_place = not selection and slices.only_tensors
    sizes = {tensor.name: tensor.bytes for tensor in once}
    return Inspected(
        path,
        slices.format,
        files,
        tensors,
        totals,
        tuple(expected(usable, slices.format, sizes, sized if in_place else None)),
        sized,
        {name: type_name(value) for name, value in slices.values.items()},
        quantised.in_checkpoint(path, slices),
        adapter_note(root),
        gguf.architecture(path) if slices.format == gguf.NAME else "",
    )


def expected(
    strategies: Iterable[StrategyInfo],
    layout: str,
    sizes: dict[str, int],
    storages: Footprint | None = None,
) -> list[Expected]:
    """Return the expected memory, by its constant PEAK, of each strategy that loads in one process.

    ``layout`` is the checkpoint's format. ``sizes`` maps the names of tensors to their sizes in
    bytes, with one name for tied tensors. ``storages`` has the sizes of the storages in the
    checkpoint's files; None if the strategies load converted files, in which the storages and the
    tensors have equal sizes.
    """
    total = sum(sizes.values())
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        layers[module_of(name)] = layers.get(module_of(name), 0) + size
    largest = max(sizes.values(), default=0)
    needs = []
    for info in strategies:
        if info.shares_load:
            continue
        is_read = layout in info.formats
        in_file = storages if storages and is_read else None
        memory = {
            "model": total,
            "storages": in_file.storage_bytes if in_file else total,
            "tensor": largest,
            "layer": max(layers.values(), default=0),
            "shard": min(total, max(SHARD_BYTES, largest)),
        }
        mapped = in_file.used_bytes if in_file else total
        if not info.peak:
            needs.append(Expected(info.name, info.formats, None, None))
            continue
        of_format = info.formats.index(layout) if is_read and len(info.peak) > 1 else 0
        words = info.peak[of_format].split(" + ")
        anonymous_bytes = sum(memory[word] for word in words if word != "mapped")
        mapped_bytes = mapped if "mapped" in words else 0
        needs.append(Expected(info.name, info.formats, anonymous_bytes, mapped_bytes))
    return needs


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


def tables(
    inspected: Inspected, *, sort: str = "file", show_all: bool = False
) -> list[Table | str]:
    """Return the tables and lines that ``weighin inspect`` prints for a checkpoint.

    Raises:
        UnknownName: ``sort`` is not one of SORTS.
    """
    tensors = _in_order(
        inspected.tensors, sort, lambda tensor: tensor.name, lambda tensor: tensor.bytes
    )
    needs = Table("strategy", "reads this format", box=SIMPLE_HEAD, pad_edge=False)
    needs.title = "expected peak of a load on the CPU"
    needs.add_column("anonymous", justify="right")
    needs.add_column("file-backed", justify="right")
    for need in sorted(inspected.expected, key=lambda need: inspected.layout not in need.layouts):
        reads = inspected.layout in need.layouts
        needs.add_row(
            escape(need.strategy),
            "yes" if reads else f"no: use --format {need.layouts[0]}",
            *(
                "-" if size is None else format_bytes(size)
                for size in (need.anonymous_bytes, need.mapped_bytes)
            ),
        )
    return [
        _tensor_table(tensors, show_all),
        *_summary(inspected),
        *_notes(inspected),
        needs,
        "The expected peaks are computed from sizes, not measured, and leave out the memory of"
        " `import torch`. weighin bench measures them.",
    ]


def _in_order(
    items: Sequence[Item], sort: str, name: Callable[[Item], str], size: Callable[[Item], int]
) -> list[Item]:
    """Return the items sorted by name or by size (the largest first); "file" keeps their order."""
    if sort not in SORTS:
        raise UnknownName("order of tensors", sort, SORTS)
    if sort == "size":
        return sorted(items, key=size, reverse=True)
    return sorted(items, key=name) if sort == "name" else list(items)


def _tensor_table(tensors: list[Tensor], show_all: bool) -> Table:
    sharing = any(tensor.shared_with for tensor in tensors)
    encoded = any(tensor.encoding for tensor in tensors)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("size", justify="right")
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


def _summary(inspected: Inspected) -> Iterator[str]:
    totals = inspected.totals
    strided = sum(not tensor.contiguous for tensor in inspected.tensors)
    counts = (
        [f"{totals['shared']} sharing a storage with an earlier one"] if totals["shared"] else []
    )
    counts += [f"{strided} not contiguous"] if strided else []
    yield (
        f"{one_line(str(inspected.path))}: format {inspected.layout}, {totals['tensors']} tensors"
        + (f" ({', '.join(counts)})" if counts else "")
        + f", {totals['numbers']:,} elements (parameters and buffers), {format_bytes(totals['bytes'])}"
    )
    if inspected.architecture:
        yield f"architecture: {one_line(inspected.architecture)}"
    if any(tensor.encoding for tensor in inspected.tensors):
        types = Counter(tensor.encoding or tensor.dtype for tensor in inspected.tensors)
        listed = ", ".join(f"{name} ({count})" for name, count in types.most_common())
        yield (
            f"quantised: {listed}; {format_bytes(totals['stored_bytes'])} as stored,"
            f" {format_bytes(totals['bytes'])} dequantised"
        )
    largest = next(one for one in inspected.tensors if one.name == totals["largest"])
    yield f"largest: {one_line(largest.name, 100)}, {format_bytes(largest.bytes)}"
    files = [f"{name} ({format_bytes(size)})" for name, size in inspected.files[:_SHOWN_FILES]]
    more = len(inspected.files) - len(files)
    yield f"files: {one_line(', '.join(files))}" + (f" and {more} more" if more > 0 else "")


def _notes(inspected: Inspected) -> Iterator[str]:
    """Yield notes on everything that distinguishes the checkpoint from a plain dict of tensors."""
    sized = inspected.footprint
    if sized.unused_bytes:
        yield (
            f"{format_bytes(sized.unused_bytes)} of the files belong to no tensor, and torch.load reads them"
            " too: torch.save writes the whole storage of a slice. Write the tensors alone: weighin convert"
            f" {one_line(str(inspected.path))} NEW.safetensors; or save slice.clone()"
        )
    if sized.repeated:
        yield (
            f"repeated (expanded) elements: {first_names(map(plain, sized.repeated))}; the storages have"
            f" {format_bytes(sized.storage_bytes)}, a model has {format_bytes(sized.tensor_bytes)}"
        )
    if inspected.values:
        kinds = (f"{plain(name)} ({kind})" for name, kind in inspected.values.items())
        yield f"left out, because they are no tensors: {one_line(first_names(kinds))}"
    if inspected.adapter:
        yield inspected.adapter
    if found := inspected.quantised:
        yield found.summary
        yield (
            f"{found.obstacle}; {found.repair}"
            if found.obstacle
            else f"{found.loaders} (needs {found.needed}); the peaks below are of a model that takes"
            " the codes and the scales as they are"
        )


def _shown(name: str) -> str:
    return escape(one_line(name, 100))


def inspect_pipeline(path: Path) -> dict[str, Any]:
    """Describe the pipeline of diffusers in a folder as data for ``--json``; read no tensor data.

    A part that cannot be read has an ``error``. ``totals`` are sums over the other parts.
    """
    found = pipeline.read(path)
    parts: list[dict[str, Any]] = []
    for part in found.models:
        about: dict[str, Any] = {
            "name": part.name,
            "library": part.library,
            "class": part.class_name,
            "path": str(part.path),
            **dict.fromkeys(("layout", "dtypes", "files", "totals", "error")),
        }
        try:
            inspected = inspect(part.path)
        except HarnessError as error:
            about["error"] = one_line(f"{error.message}. {error.repair}")
        else:
            dtypes = Counter(tensor.dtype for tensor in inspected.tensors).most_common()
            about["dtypes"] = [dtype for dtype, _ in dtypes]
            about |= {key: inspected.as_json()[key] for key in ("layout", "files", "totals")}
        parts.append(about)
    read = [each["totals"] for each in parts if each["totals"]]
    folders = [part for part in found.parts if part.path.is_dir()]
    return {
        "path": str(path),
        "pipeline": found.class_name,
        "parts": parts,
        "without_weights": [part.name for part in folders if part.file_bytes is None],
        "missing": [part.name for part in found.parts if part not in folders],
        "totals": {key: sum(each[key] for each in read) for key in _SUMMED},
    }


def pipeline_tables(found: Mapping[str, Any], *, sort: str = "file") -> list[Table | str]:
    """Return the table and the lines that ``weighin inspect`` prints for a pipeline.

    Raises:
        UnknownName: ``sort`` is not one of SORTS.
    """

    def size(part: Mapping[str, Any]) -> int:
        return int(part["totals"]["bytes"]) if part["totals"] else 0

    parts = found["parts"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("part", "class", "format", "dtype"):
        table.add_column(heading, overflow="fold")
    table.add_column("tensors", justify="right")
    table.add_column("size", justify="right")
    for part in _in_order(parts, sort, lambda part: str(part["name"]), size):
        totals = part["totals"]
        table.add_row(
            escape(one_line(part["name"])),
            escape(one_line(part["class"])),
            part["layout"] or "not read",
            ", ".join(part["dtypes"] or ()),
            f"{totals['tensors']}" if totals else "-",
            format_bytes(totals["bytes"]) if totals else "-",
        )
    lines = [
        f"{one_line(found['path'])}: a pipeline of diffusers"
        + (f", {one_line(found['pipeline'])}" if found["pipeline"] else "")
        + f", {len(parts)} models, {format_bytes(found['totals']['bytes'])}",
        *(f"{part['name']} is not read: {part['error']}" for part in parts if part["error"]),
    ]
    for what, names in (
        ("without weights", found["without_weights"]),
        ("named in model_index.json, but not in the folder", found["missing"]),
    ):
        if names:
            lines.append(f"{what}: {one_line(', '.join(names))}")
    largest = max(parts, key=size)
    lines.append(
        f"Each part is a model of its own: weighin inspect {quote(largest['path'])}. weighin predict"
        " and recommend take the whole pipeline."
    )
    return [table, *lines]
