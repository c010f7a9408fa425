"""Run ``weighin convert``: start the subprocess that converts, and show its progress."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from weighin import formats
from weighin.checkpoint import sidecar, staging
from weighin.checkpoint.subprocess_client import run_maker
from weighin.errors import ConfigError, UnknownName
from weighin.formats.base import Slices
from weighin.formats.misfit import first_names, plain
from weighin.formats.pretrained_library import AS_SAVED, FolderChoice
from weighin.formats.quantised import Quantised, in_checkpoint
from weighin.formats.selection import WHOLE, Selection
from weighin.settings.definition import DTYPES
from weighin.text import one_line
from weighin.units import GIB, format_bytes, format_seconds, parse_bytes

AUTO: Final = "auto"
_BESIDE: Final = 64  # bytes by which the names of temporary files and checksums are longer

_FOLDER: Final = "sharded"  # the format for a target without a file's suffix
_SUFFIXES: Final = {
    ".safetensors": ("safetensors",),
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".pth.tar"), ("pt", "pt_legacy")),
}
"""For each suffix, the formats that programs expect in such a file; ``auto`` writes the first."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The arguments of ``weighin convert``; "5GB" means 5 * 1000**3 bytes, as in Hugging Face."""

    source: Path
    target: Path
    fmt: str
    dtype: str | None
    max_shard_size: str
    verify: bool
    selection: Selection = WHOLE
    keys: str = "file"
    choice: FolderChoice = AS_SAVED


@dataclass(frozen=True, slots=True)
class FinishedConversion:
    """A finished conversion.

    Attributes:
        checksums: the checksum file that the source matched, if any.
        quantised: how the tensors are quantised, if they are codes with scales; None for weights.
        left_out: the names of the values that are no tensors, in a source from ``torch.save``. The
            target lacks these values.
    """

    source: Path
    source_format: str
    target: Path
    format: str
    bytes: int
    seconds: float
    checksums: Path | None
    verified: bool
    quantised: Quantised | None = None
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        checked = f", source matches {self.checksums}" if self.checksums else ""
        checked += ", every tensor's checksum verified" if self.verified else ""
        checked += f"; {self.quantised.summary}" if self.quantised else ""
        if self.left_out:
            names = first_names(map(plain, self.left_out))
            checked += f"; left out, because they are no tensors: {one_line(names)}"
        return (
            f"{self.target}: {self.format} from {self.source_format}, {format_bytes(self.bytes)} in "
            f"{format_seconds(round(self.seconds * 1e9))} "
            f"({self.bytes / GIB / self.seconds:.2f} GiB/s){checked}"
        )

    def as_json(self) -> dict[str, Any]:
        paths = {"source": str(self.source), "target": str(self.target)}
        checksums = str(self.checksums) if self.checksums else None
        return asdict(self) | paths | {"checksums": checksums}


def convert(
    wish: Wish, console: Console, complete: Callable[[], None] = lambda: None
) -> FinishedConversion:
    """Convert the checkpoint in a subprocess, and show the progress on ``console``.

    ``convert`` calls ``complete`` when the target is complete. ``convert`` ignores a Ctrl-C that
    comes when the target already has its name.

    Raises:
        HarnessError: the conversion failed; ``convert`` has removed its unfinished files.
    """
    source = formats.detect(wish.source).NAME
    _check_name(wish.target)
    # The source's checksums are those of all its tensors under their original names.
    checksums = None if wish.selection or wish.keys == "model" else sidecar.find(wish.source)
    request = _request(wish, checksums)

    def permit(needed_bytes: int) -> None:
        free = shutil.disk_usage(wish.target.parent).free
        if free < needed_bytes:
            raise ConfigError(
                f"{wish.target} needs {format_bytes(needed_bytes)}, "
                f"but only {format_bytes(free)} are free in {wish.target.parent}",
                "name a target on another disk, or free some space",
            )

    slices = Slices() if wish.keys == "model" else formats.read(wish.source, wish.selection)[1]
    started = monotonic()
    with _shown(console, f"{wish.source.name} to {wish.target.name}") as report:
        try:
            seconds = run_maker(request, permit=permit, report=report)["write"]
            complete()
        except BaseException as error:
            _clean(wish.target, error)
            # The target gets its name when it is complete.
            if not isinstance(error, KeyboardInterrupt) or not wish.target.exists():
                raise
            seconds = monotonic() - started
    return FinishedConversion(
        source=wish.source,
        source_format=source,
        target=wish.target,
        format=formats.detect(wish.target).NAME,
        bytes=sum(file.stat().st_size for file in formats.files(wish.target)),
        seconds=seconds,
        checksums=checksums,
        verified=wish.verify,
        quantised=in_checkpoint(wish.source, slices),
        left_out=tuple(slices.values),
    )


def _check_name(target: Path) -> None:
    """Raise ConfigError if the files beside the target would have names that are too long."""
    most = (os.pathconf(target.parent, "PC_NAME_MAX") if target.parent.is_dir() else 255) - _BESIDE
    if (length := len(os.fsencode(target.name))) > most:
        raise ConfigError(
            f"the target's name has {length} bytes; files beside it get longer names",
            f"give it a name of at most {most} bytes",
        )


def _clean(target: Path, error: BaseException) -> None:
    """Remove the files of a subprocess that was ended by Ctrl-C or killed by the kernel."""
    try:
        staging.remove_dead(target)
    except (ConfigError, OSError) as left:
        error.add_note(str(left))


def format_for(target: Path, fmt: str) -> str:
    """Return the format to write into ``target``; for ``AUTO``, the format for the target's suffix.

    With ``AUTO``, a target without the suffix of a checkpoint file becomes a folder of shards.

    Raises:
        UnknownName: no format has the name ``fmt``.
        ConfigError: programs expect another format than ``fmt`` in a file with the target's suffix,
            or, with ``AUTO``, the suffix is that of no format.
    """
    suffix = next((one for one in _SUFFIXES if target.name.lower().endswith(one)), "")
    expected = _SUFFIXES.get(suffix, ())
    if fmt == AUTO and not suffix and re.fullmatch(r"\.[A-Za-z]{1,12}", target.suffix):
        raise ConfigError(
            f"{target}: no format of checkpoints has the suffix {target.suffix}",
            f"name the target model.safetensors or model.pt; to write a folder of shards of this name,"
            f" add --format {_FOLDER}",
        )
    if fmt == AUTO:
        return expected[0] if expected else _FOLDER
    layout = formats.named(fmt)
    if suffix and fmt not in expected:
        other = f"{target.name[: -len(suffix)]}{layout.SUFFIX}"
        raise ConfigError(
            f"{target}: {suffix} is the suffix of format {expected[0]}, but --format says {fmt}",
            f"to write {expected[0]}, leave --format out; for the format of --format, name the"
            f" target {other}",
        )
    return fmt


def _request(wish: Wish, checksums: Path | None) -> dict[str, Any]:
    fmt = format_for(wish.target, wish.fmt)
    if wish.dtype is not None and wish.dtype not in DTYPES:
        raise UnknownName("dtype", wish.dtype, DTYPES)
    return {
        "verb": "convert",
        "source": str(wish.source),
        "target": str(wish.target),
        "format": fmt,
        "dtype": DTYPES[wish.dtype] if wish.dtype else None,
        "max_shard_bytes": parse_bytes(wish.max_shard_size, decimal=True),
        "verify": wish.verify,
        "checksums": str(checksums) if checksums else None,
        "selection": asdict(wish.selection),
        "model_keys": wish.keys == "model",
        "choice": asdict(wish.choice)
        | {"variant": "", "revision": ""},  # the source is the file of this variant and revision
    }


@contextmanager
def _shown(console: Console, text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a line with the share done, the speed and the remaining time; yield its update function.

    The yielded function takes the number of bytes done and the total.
    """
    started = monotonic()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(escape(text), total=None, speed="")

        def report(done_bytes: int, total_bytes: int) -> None:
            speed = f"{done_bytes / GIB / max(monotonic() - started, 1e-9):.2f} GiB/s"
            bar.update(task, completed=done_bytes, total=total_bytes, speed=speed)

        yield report
