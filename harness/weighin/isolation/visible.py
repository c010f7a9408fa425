"""What a container sees: this machine's programs, this Python, and the files of one cell, each at the same
path as here, by its own name and by its real name; all but one folder read-only.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from weighin import child_process
from weighin.cell import Job
from weighin.stream import formats
from weighin.stream.hugging_face_folder import folder_of
from weighin.stream.pretrained_library import library_of
from weighin.suite.registry import data_folder

SHELL: Final[tuple[str, ...]] = ("/bin/sh",)
_SYSTEM: Final = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/nix/store", "/gnu/store"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/ld.so.cache", "/etc/localtime"),
    *("/etc/alternatives", "/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust"),
)


def of_machine() -> tuple[str, ...]:
    """Return the paths of this machine's programs, of this Python with its packages, and of weighin; never the
    root, the home or the current folder merely because ``sys.path`` has it.
    """
    whole = {"/", os.path.realpath(os.path.expanduser("~"))}  # noqa: PTH111
    with contextlib.suppress(FileNotFoundError):  # the current folder was deleted
        whole.add(os.path.realpath("."))
    found = (sys.prefix, sys.base_prefix, *(path for path in sys.path if path), *_editable())
    own = (str(Path(child_process.__file__).parent), str(data_folder("strategies")))
    return (*_SYSTEM, *(path for path in found if os.path.realpath(path) not in whole), *own)


@cache
def _editable() -> tuple[str, ...]:
    origins = (each.read_text("direct_url.json") for each in metadata.distributions())
    return tuple(
        unquote(urlsplit(origin["url"]).path)
        for origin in map(json.loads, filter(None, origins))
        if origin.get("dir_info", {}).get("editable")
    )


def of_job(job: Job) -> Iterator[str]:
    checkpoint = Path(job.checkpoint)
    if checkpoint.is_dir():
        yield job.checkpoint
        # The Hub's cache consists of links, whose targets are elsewhere.
        yield from (str(file) for file in checkpoint.rglob("*") if file.is_symlink())
    else:
        is_index = checkpoint.suffix == ".json"
        yield from map(str, formats.files(checkpoint) if is_index else [checkpoint])
        if library_of(job.cell.model.builder):  # from_pretrained reads them
            yield from map(str, folder_of(checkpoint).glob("*.json"))
    yield from (job.manifest, job.files_manifest, job.strategy_path, job.use_path, *job.python_path)


def binds(seen: Iterable[str], fixed: Iterable[str] = ()) -> dict[str, str]:
    """Return the real path here of each path in a container: of those that exist, and that no other path
    contains, unless they are in ``fixed``.
    """

    def named(paths: Iterable[str]) -> dict[str, str]:
        here = [os.path.abspath(path) for path in paths if path and os.path.exists(path)]  # noqa: PTH100, PTH110
        real = {path: os.path.realpath(path) for path in here}
        return {path: path for path in real.values() if path != "/"} | real

    def is_contained(target: str, source: str) -> bool:
        parts = ((real, target.removeprefix(f"{above}/")) for above, real in wanted.items())
        return any(rest != target and source == f"{real}/{rest}" for real, rest in parts)

    apart = named(fixed)
    wanted = named(seen) | apart
    wanted.pop("/", None)
    return {t: s for t, s in wanted.items() if t in apart or not is_contained(t, s)}


def own_shell() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return how to run this machine's shell in any image, even in one without a shell, and its files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [Path(line.split(maxsplit=5)[5]) for line in lines if " /" in line]
    loader = next(file for file in mapped if file.name.startswith("ld-"))
    libc = next((file for file in mapped if file.name.startswith("libc")), loader)
    files = {"loader": loader, "lib": libc.parent, "sh": Path(SHELL[0]).resolve()}
    command = ("/weighin/loader", "--library-path", "/weighin/lib", "/weighin/sh")
    return command, {f"/weighin/{name}": str(path) for name, path in files.items()}
