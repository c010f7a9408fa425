"""Write a checkpoint in another format or dtype: ``weighin convert``.

``Conversion.run`` starts a child, which calls ``Conversion.write``. The files grow in a hidden folder next to
the target and get its name when they are complete, so that a killed child leaves no target.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from msgspec import to_builtins

from weighin.checkpoint import temporary_folders
from weighin.checkpoint.child import Report, run_child
from weighin.errors import CheckpointError, ConfigError
from weighin.files import rename
from weighin.stream import formats, hugging_face_folder
from weighin.stream import gguf_files as gguf
from weighin.stream.pretrained_library import AS_SAVED, WHOLE, FolderChoice, Selection
from weighin.stream.quantised import in_checkpoint
from weighin.stream.sharded_files import MAX_SHARD_BYTES
from weighin.stream.slices import Plans, Slice, check_converts
from weighin.text import first_names, one_line, plain
from weighin.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    import torch

    Source = tuple[Plans, Callable[[str], Iterator[torch.Tensor]], int, dict[str, Any]]
    """The tensors to write, the function that reads one, the bytes to read, and notes on the source."""

AUTO: Final = "auto"
_SUFFIXES: Final = {
    ".safetensors": "safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".pth.tar"), "pt"),
}
"""For each suffix, the format that programs expect in such a file, and that ``auto`` writes."""


@dataclass(frozen=True, slots=True)
class Conversion:
    source: Path
    target: Path
    fmt: str = AUTO
    # torch's name of the new dtype of floating-point tensors; empty keeps their own
    dtype: str = ""
    max_shard_bytes: int = MAX_SHARD_BYTES
    verify: bool = False  # read the target back from the disk, and compare it with the source
    selection: Selection = WHOLE
    model_keys: bool = False  # write the state dict of the model that ``load_pretrained`` loads
    choice: FolderChoice = AS_SAVED  # how it loads this model

    def run(self, report: Report, complete: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Convert in a child, and return the fields of ``--json``; call ``complete`` at the end."""
        source_format = formats.detect(self.source)
        chosen = replace(self, fmt=format_for(self.target, self.fmt))
        request = {
            "verb": "convert",
            "conversion": to_builtins(chosen, enc_hook=str),
            "space": (str(self.target.parent), str(self.target), "choose a target on another disk"),
        }
        done: dict[str, Any] = {}
        started = monotonic()
        try:
            done = run_child(
                request, report=partial(report, f"{self.source.name} to {self.target.name}")
            )
            complete()
        except BaseException as error:
            # Of a child that was killed.
            temporary_folders.remove_orphans(self.target.parent, self._beside)
            if not isinstance(error, KeyboardInterrupt) or not self.target.exists():
                raise
        return {
            "source": str(self.source),
            "source_format": source_format,
            "target": str(self.target),
            "format": formats.detect(self.target),
            "bytes": sum(file.stat().st_size for file in formats.files(self.target)),
            "seconds": done.get("seconds", monotonic() - started),
            "verified": self.verify,
            "quantised": done.get("quantised"),
            "left_out": done.get("left_out", []),
        }

    @property
    def _beside(self) -> str:
        """The beginning of the name of the hidden folder; file systems allow names of 255 bytes."""
        return f".{self.target.name[:40]}.weighin-"

    def check_target(self) -> None:
        """Raise ConfigError if the target exists or cannot be made, or is inside the source."""
        target, folder = self.target, self.target.parent
        if os.path.lexists(target):
            what = f"{target} exists already"
            raise ConfigError(what, "choose another target, or remove the existing one first")
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder", f"create the folder: mkdir -p {folder}")
        if self.source.resolve() in target.resolve().parents:
            what = f"{target} is inside {self.source}"
            raise ConfigError(what, "choose a target outside of the source")
        if len(os.fsencode(target.name)) > (most := os.pathconf(folder, "PC_NAME_MAX")):
            repair = f"choose a name of at most {most} bytes"
            raise ConfigError("the target's name is too long", repair)

    def write(
        self, permit: Callable[[int, int], None] = lambda _to_write, _to_read: None
    ) -> dict[str, Any]:
        """Convert in this process; return the seconds that the writing took, and what is told of the source."""
        import torch

        from weighin.checkpoint.checksum import summing
        from weighin.checkpoint.reader import RECORD_BYTES
        from weighin.stream.construct import map_large_tensors
        from weighin.stream.write import write

        self.check_target()
        map_large_tensors()
        tensors, source_pieces, to_read, told = self._loaded() if self.model_keys else self._read()
        torch.set_num_threads(1)  # the format's writers run in several threads of their own
        if self.dtype:  # also of a model: transformers dequantises fp8 into bfloat16
            dtype = getattr(torch, self.dtype)
            tensors = [
                replace(plan, dtype=dtype if plan.dtype.is_floating_point else plan.dtype)
                for plan in tensors
            ]
        plans = {plan.name: plan for plan in tensors}
        sums: dict[str, dict[str, str]] = {}

        def pieces(name: str) -> "Iterator[torch.Tensor]":
            numel, dtype = prod(plans[name].shape), plans[name].dtype
            converted = (piece.to(dtype) for piece in source_pieces(name))
            if not self.verify:
                return converted
            return summing(name, converted, numel, dtype, sums, is_kept=True)

        stored = sum(plan.nbytes for plan in tensors if plan.shared_with is None)
        permit(RECORD_BYTES * len(tensors) + stored, to_read + stored * self.verify)
        fmt, started = format_for(self.target, self.fmt), monotonic()
        with temporary_folders.own_folder(self.target.parent, self._beside) as temporary:
            new = temporary / self.target.name
            write(fmt, new, tensors, pieces, max_shard_bytes=self.max_shard_bytes)
            seconds = monotonic() - started
            if self.verify:
                _verify(new, tensors, sums)
            self.check_target()
            rename(new, self.target)
        return {"seconds": seconds} | told

    def _read(self) -> "Source":
        """Return the tensors of the file, by their names in it."""
        from weighin.checkpoint import reader

        slices = formats.read(self.source, self.selection)
        formats.refuse_empty(self.source, slices)
        found = in_checkpoint(self.source, slices)
        if self.dtype:
            check_converts(self.source, slices, "leave --dtype out")
        if self.dtype and found:
            raise CheckpointError(
                f"{self.source}: {found.summary}; in another dtype, the quantised values would be useless",
                "leave --dtype out to copy the quantised values and their scales"
                + (", or add --keys model to dequantise them" if found.dequantises else ""),
            )
        places = {where.name: where for where in slices}
        told = {"quantised": found.as_json() if found else None, "left_out": [*slices.values]}
        to_read = reader.bytes_to_read(slices)
        return reader.plans(slices), lambda name: reader.read_pieces(places[name]), to_read, told

    def _loaded(self) -> "Source":
        """Return the tensors of the loaded model, by their names in its state dict."""
        from weighin.checkpoint import generate
        from weighin.stream.load_pretrained import load_pretrained

        folder, choice = hugging_face_folder.folder_of(self.source), self.choice
        model_class = choice.model_class
        if formats.detect(self.source) == gguf.NAME:
            folder = gguf.file_of(self.source)
        elif not hugging_face_folder.is_pretrained(folder):
            raise ConfigError(
                f"--keys model needs the model's class, and {folder} has no config.json",
                "name a folder that save_pretrained wrote, or leave --keys out",
            )
        else:
            if folder != self.source:  # raises if another file would be read
                hugging_face_folder.from_pretrained_arguments(self.source)
            if not model_class and hugging_face_folder.parts_with_weights(folder):
                # the transformer alone
                model_class = hugging_face_folder.read_folder(folder, choice).wanted
        model = load_pretrained(
            folder,
            dtype=self.dtype or "auto",
            trust_remote_code=choice.trust_remote_code,
            variant=hugging_face_folder.variant_of(self.source),
            model_class=model_class,
            key=self.selection.key,
            strip_prefix=self.selection.strip_prefix,
            adapter=choice.adapter,
        )
        described = generate.describe_model(model)
        left_out = [name for name in model.state_dict() if name not in described]
        told = {"quantised": None, "left_out": left_out}
        return generate.plans(described), lambda name: described[name].read(), 0, told


def _verify(new: Path, tensors: Plans, sums: Mapping[str, Mapping[str, str]]) -> None:
    """Read the new checkpoint back from the disk, and compare every tensor with what was written."""
    from weighin.checkpoint.reader import checksum_of, plans
    from weighin.stream.write import run_parallel

    wrong: list[str] = []

    def check(where: Slice) -> None:
        if [checksum_of(where)] != [*sums[where.name].values()]:
            wrong.append(where.name)

    slices, what = formats.read(new), "names, shapes, dtypes or ties than the source"
    # Not in order: in safetensors, tied names come last.
    if {one.name: one for one in plans(slices)} == {one.name: one for one in tensors}:
        run_parallel(partial(check, where) for where in slices if where.name in sums)
        if not wrong:
            return
        what = f"values than the source, such as in {', '.join(sorted(wrong)[:3])}"
    raise CheckpointError(
        f"{new.name}: read back, the new checkpoint has other {what}; weighin removed it",
        "test this machine's disk and memory for faults, then run weighin convert again",
    )


def format_for(target: Path, fmt: str) -> str:
    """Return the format to write. ``AUTO`` is that of the target's suffix; without a suffix, shards."""
    suffix = next((one for one in _SUFFIXES if target.name.lower().endswith(one)), "")
    expected = _SUFFIXES.get(suffix, "")
    if fmt == AUTO and not suffix and re.fullmatch(r"\.[A-Za-z]{1,12}", target.suffix):
        raise ConfigError(
            f"{target}: weighin writes no format with the suffix {target.suffix}",
            f"use the suffix .safetensors or .pt; or, for a folder of shards called {target.name}, add"
            " --format sharded",
        )
    if fmt == AUTO:
        return expected or "sharded"
    own = formats.suffix_of(fmt)
    if suffix and fmt != expected:
        raise ConfigError(
            f"{target}: {suffix} is the suffix of format {expected}, but --format says {fmt}",
            f"to write {expected}, leave --format out; to write {fmt}, call the target"
            f" {target.name[: -len(suffix)]}{own}",
        )
    return fmt


def sentence(done: Mapping[str, Any]) -> str:
    """Return the line that ``weighin convert`` prints, from the fields that ``run`` returned."""
    text = (
        f"{done['target']}: {done['format']} from {done['source_format']},"
        f" {format_bytes(done['bytes'])} in {format_seconds(round(done['seconds'] * 1e9))}"
        f" ({done['bytes'] / GIB / done['seconds']:.2f} GiB/s)"
    )
    if done["verified"]:
        text += ", every tensor's checksum verified"
    if done["quantised"]:
        text += f"; {done['quantised']['summary']}"
    if done["left_out"]:
        names = one_line(first_names(map(plain, done["left_out"])))
        text += f"; left out, because they are no tensors: {names}"
    return text
