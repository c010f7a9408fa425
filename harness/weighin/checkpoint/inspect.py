"""List a checkpoint's tensors, and the memory that strategies should need, by sizes alone."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Final

from weighin.files import object_in
from weighin.show.table import Column, Entry, Table
from weighin.stream import formats, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream.foreign import remembering
from weighin.stream.hugging_face_folder import CONFIG, adapter_note, is_pretrained
from weighin.stream.pickles import type_name
from weighin.stream.pretrained_library import WHOLE, Selection, library_in
from weighin.stream.sharded_files import MAX_SHARD_BYTES, module_of
from weighin.stream.slices import ITEM_BYTES, Checkpoint, Slice, ties
from weighin.suite import registry
from weighin.suite.registry import StrategyInfo
from weighin.text import few, first_names, one_line, plain
from weighin.units import format_bytes

Document = dict[str, Any]
"""The content of ``--json``."""

_SHOWN_ROWS: Final = 20  # rows of a long table: half from its start, half from its end


def _storages(slices: Sequence[Slice]) -> tuple[int, int]:
    """Return the bytes of the storages that ``torch.save`` writes whole, and of the part that tensors use."""
    sizes: dict[tuple[Path, int], int] = {}
    spans: dict[tuple[Path, int], list[tuple[int, int]]] = {}  # from where to where tensors lie
    for one in chain.from_iterable(one.parts or [one] for one in slices):
        if one.storage_bytes:
            storage = one.file, one.storage_offset
            sizes[storage] = max(sizes.get(storage, 0), one.storage_bytes)
            size = one.storage_bytes if one.encoding else one.span * ITEM_BYTES[one.dtype_name]
            spans.setdefault(storage, []).append((one.offset, one.offset + size))
    used_bytes = 0
    for inside in spans.values():
        reached = 0
        for start, end in sorted(inside):
            used_bytes += max(0, end - max(start, reached))
            reached = max(reached, end)
    return sum(sizes.values()), used_bytes


@remembering()
def inspect(path: Path, selection: Selection = WHOLE) -> Document:
    """Describe a checkpoint of any format, as ``--json`` does."""
    slices = formats.read(path, selection)
    formats.refuse_empty(path, slices)
    layout, root = slices.format, path if path.is_dir() else path.parent
    names = {
        file: str(file.relative_to(root)) if file.is_relative_to(root) else str(file)
        for file in {*slices.files, *(one.file for one in slices)}
    }
    files = [{"name": names[file], "bytes": file.stat().st_size} for file in slices.files]
    tied = ties(slices)
    firsts: dict[tuple[Path, int], str] = {}
    tensors: list[Document] = []
    for place in slices:
        first = place.name
        if place.storage_bytes:  # the offset of an empty storage means nothing
            first = firsts.setdefault((place.file, place.storage_offset), place.name)
        tensors.append(
            {
                "name": place.name,
                "shape": place.shape,
                "dtype": place.dtype_name,
                "bytes": place.nbytes,
                "file": names[place.file],
                "offset": place.offset,
                "shared_with": first if first != place.name else None,
                "tied_to": tied.get(place.name),
                "contiguous": place.contiguous,
                "encoding": place.encoding or None,
                "stored_bytes": place.storage_bytes if place.encoding else place.nbytes,
            }
        )
    once = [tensor for tensor in tensors if tensor["tied_to"] is None]
    sizes = {tensor["name"]: tensor["bytes"] for tensor in once}
    storages = storage_bytes, used_bytes = _storages(slices)
    library = library_in(object_in(root / CONFIG)).name if is_pretrained(root) else ""
    usable = [
        info
        for info in registry.strategies().values()
        if not info.needs_adapter and info.pretrained in ("", library)
    ]
    in_place = storages if not selection and slices.only_tensors else None
    found = quantised.in_checkpoint(path, slices)
    return {
        "path": str(path),
        "layout": layout,
        "architecture": gguf.architecture(path) if layout == gguf.NAME else None,
        "files": files,
        "totals": {
            "tensors": len(tensors),
            "shared": sum(tensor["shared_with"] is not None for tensor in tensors),
            "numbers": sum(prod(tensor["shape"]) for tensor in once),
            "bytes": sum(sizes.values()),
            "storage_bytes": storage_bytes,
            "unused_bytes": storage_bytes - used_bytes,
            "stored_bytes": sum(tensor["stored_bytes"] for tensor in once),
            "file_bytes": sum(file["bytes"] for file in files),
            "largest": max(tensors, key=lambda tensor: tensor["bytes"])["name"],
        },
        "tensors": tensors,
        "values": [
            {"name": name, "type": type_name(value)} for name, value in slices.values.items()
        ],
        "expected": [*expected(usable, layout, sizes, in_place)],
        "quantised": found.as_json() if found else None,
        "adapter": adapter_note(root) or None,
        "notes": [*_notes(path, root, slices, storage_bytes - used_bytes, found)],
    }


def expected(
    strategies: Iterable[StrategyInfo],
    layout: str,
    sizes: dict[str, int],
    storages: tuple[int, int] | None = None,  # None: of converted files, without unused bytes
) -> Iterator[Document]:
    """Yield the memory to expect of each strategy that loads in one process, from its constant PEAK."""
    total, largest = sum(sizes.values()), max(sizes.values(), default=0)
    layers: Counter[str] = Counter()
    for name, size in sizes.items():
        layers[module_of(name)] += size
    memory = {
        "model": total,
        "tensor": largest,
        "layer": max(layers.values(), default=0),
        "shard": min(total, max(MAX_SHARD_BYTES, largest)),
    }
    for info in strategies:
        if info.shares_load:
            continue
        is_read = layout in info.formats
        memory["storages"], used_bytes = (storages if is_read else None) or (total, total)
        anonymous = mapped = None
        if info.peak:
            of_format = info.formats.index(layout) if is_read and len(info.peak) > 1 else 0
            words = info.peak[of_format].split(" + ")
            anonymous = sum(memory[word] for word in words if word != "mapped")
            mapped = used_bytes * ("mapped" in words)
        yield {
            "strategy": info.name,
            "layouts": info.formats,
            "anonymous_bytes": anonymous,
            "mapped_bytes": mapped,
        }


def _notes(
    path: Path, root: Path, slices: Checkpoint, unused_bytes: int, found: quantised.Quantised | None
) -> Iterator[str]:
    """Yield notes on what makes the checkpoint more than a plain dict of tensors."""
    if unused_bytes:
        yield (
            f"{format_bytes(unused_bytes)} of the files belong to no tensor, but torch.load reads them, too:"
            " torch.save wrote the whole storage of a slice. To write the tensors alone: weighin convert"
            f" {one_line(str(path))} NEW.safetensors; or save slice.clone()"
        )
    if slices.values:
        kinds = (f"{plain(name)} ({type_name(value)})" for name, value in slices.values.items())
        yield f"left out, because they are no tensors: {one_line(first_names(kinds))}"
    if adapter := adapter_note(root):
        yield adapter
    if found:
        yield found.summary
        if found.obstacle:
            yield f"{found.obstacle}; {found.repair}"
        else:
            ours = "load_pretrained, streaming and convert --keys model dequantise them, and "
            yield (
                f"{ours * found.dequantises}from_pretrained loads them; the peaks below are of a model"
                " that takes the quantised values and their scales as they are"
            )


def tables(found: Document, *, show_all: bool = False) -> list[Table | str]:
    """Return what ``weighin inspect`` prints for a checkpoint."""
    layout, totals, tensors = found["layout"], found["totals"], found["tensors"]
    shared = f" ({totals['shared']} sharing a storage with another)" if totals["shared"] else ""
    lines = [
        f"{one_line(found['path'])}: format {layout}, {totals['tensors']} tensors{shared},"
        f" {totals['numbers']:,} elements (parameters and buffers), {format_bytes(totals['bytes'])}"
    ]
    if found["architecture"]:
        lines.append(f"architecture: {one_line(found['architecture'])}")
    if any(one["encoding"] for one in tensors):
        stored, whole = format_bytes(totals["stored_bytes"]), format_bytes(totals["bytes"])
        lines.append(f"quantised: {stored} as stored, {whole} dequantised")
    files = [
        f"{one_line(file['name'], 100)} ({format_bytes(file['bytes'])})" for file in found["files"]
    ]
    lines.append(f"files: {few(files, 5)}")
    needs = []
    for need in sorted(found["expected"], key=lambda need: layout not in need["layouts"]):
        sizes = (need["anonymous_bytes"], need["mapped_bytes"])
        is_read = "yes" if layout in need["layouts"] else f"no: use --format {need['layouts'][0]}"
        texts = ("-" if size is None else format_bytes(size) for size in sizes)
        needs.append([need["strategy"], is_read, *texts])
    heads = ("strategy", "reads this format", "anonymous", "file-backed")
    return [
        _tensor_table(tensors, show_all=show_all),
        *lines,
        *found["notes"],
        Table.of(heads, needs, names=2, title="expected peak of a load on the CPU"),
        "These peaks are computed from sizes, and leave out the memory of `import torch`. To measure"
        " them, run weighin bench.",
    ]


def _tensor_table(tensors: list[Document], *, show_all: bool) -> Table:
    texts: list[tuple[Column, Callable[[Document], str]]] = [
        (Column("tensor", is_name=True), lambda one: one_line(one["name"], 100)),
        (Column("shape", is_name=True), lambda one: " x ".join(map(str, one["shape"])) or "scalar"),
        (Column("dtype", is_name=True), lambda one: one["encoding"] or one["dtype"]),
        (Column("size"), lambda one: format_bytes(one["stored_bytes"])),
        (Column("dequantised"), lambda one: format_bytes(one["bytes"]) if one["encoding"] else ""),
        (Column("offset"), lambda one: f"{one['offset']:,}"),
        (Column("shared with", is_name=True), lambda one: one_line(one["shared_with"] or "", 100)),
    ]
    texts = [(column, text) for column, text in texts if any(map(text, tensors))]
    rows: list[list[Entry | str]] = [[text(one) for _, text in texts] for one in tensors]
    if not show_all and (left_out := len(tensors) - _SHOWN_ROWS) > 0:
        more = Entry(f"... {left_out:,} more (--all)", kind="dim")
        half = _SHOWN_ROWS // 2
        rows[half : half + left_out] = [[more, *[""] * (len(texts) - 1)]]
    return Table("", [column for column, _ in texts], rows)
