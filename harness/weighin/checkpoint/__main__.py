"""Generate, index or convert a checkpoint: ``python -m weighin.checkpoint make|index|convert ...``.

weighin runs this module as a subprocess (``subprocess_client``). Standard output has one JSON
object per line. The first object is {"event": "size", "needed_bytes"}; the process then waits for a
line on standard input before it writes any file. Progress objects are {"event": "progress",
"done_bytes", "total_bytes"}. The last object is {"event": "done", "seconds"} or {"error": {"type",
"message", "repair"}}. The kernel kills the process when its parent ends.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weighin.errors import CheckpointError, HarnessError
from weighin.formats.selection import Selection

if TYPE_CHECKING:
    from weighin.checkpoint.convert import Conversion

_PROGRESS_EVERY_S: Final = 0.1
_PR_SET_PDEATHSIG: Final = 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    _end_with_parent()
    try:
        seconds = _run(options)
    except HarnessError as error:
        kind, message, repair = type(error).__name__, error.message, error.repair
        _say({"error": {"type": kind, "message": message, "repair": repair}})
        return error.exit_code
    except OSError as error:
        repair = "check that the folder is writable and has free space"
        _say({"error": {"type": "CheckpointError", "message": str(error), "repair": repair}})
        return CheckpointError.exit_code
    _say({"event": "done", "seconds": seconds})
    return 0


def _run(options: argparse.Namespace) -> dict[str, float]:
    import_start = time.monotonic()
    # torch is imported only here, so that `--help` and wrong options do not wait for it.
    from weighin.checkpoint import convert, generate, index

    import_s = time.monotonic() - import_start
    if options.verb == "convert":
        order = _order(options)
        meter = _Meter(rounds=2 if order.verify else 1)
        return {"import": import_s} | convert.convert(
            options.source, options.target, order, permit=meter.permit, progress=meter.wrote
        )
    kwargs = json.loads(options.kwargs)
    meter = _Meter()
    if options.verb == "make":
        seconds = generate.make(
            options.model,
            options.builder,
            kwargs,
            seed=options.seed,
            fmt=options.format,
            folder=options.out,
            permit=meter.permit,
            progress=meter.wrote,
        ).seconds
    else:
        seconds = index.index(
            options.model,
            options.builder,
            kwargs,
            checkpoint=options.checkpoint,
            selection=Selection(options.key, options.strip_prefix),
            fmt=options.format,
            folder=options.out,
            permit=meter.permit,
            progress=meter.wrote,
        ).seconds
    return {"import": import_s, **seconds}


def _order(options: argparse.Namespace) -> "Conversion":
    import torch

    from weighin.checkpoint.convert import Conversion

    return Conversion(
        fmt=options.format,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
        max_shard_bytes=options.max_shard_bytes,
        verify=options.verify,
        checksums=options.checksums,
        selection=Selection(options.key, options.strip_prefix),
        model_keys=options.model_keys,
        trust_remote_code=options.trust_remote_code,
    )


class _Meter:
    """Asks the parent for permission to write, and reports the progress a few times a second.

    Each byte counts ``rounds`` times in the progress: 1 if it is written, 2 if it is also read
    back.
    """

    def __init__(self, rounds: int = 1) -> None:
        self._rounds = rounds
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._reported_s = 0.0

    def permit(self, needed_bytes: int) -> None:
        self._total = needed_bytes * self._rounds
        _say({"event": "size", "needed_bytes": needed_bytes})
        if not sys.stdin.readline():  # the parent refused the size, or has ended
            sys.exit(0)

    def wrote(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = time.monotonic()
            if now - self._reported_s >= _PROGRESS_EVERY_S:
                self._reported_s = now
                _say({"event": "progress", "done_bytes": self._done, "total_bytes": self._total})


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    parent = os.getppid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m weighin.checkpoint", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (
        ("make", "generate a checkpoint from a seed"),
        ("index", "compare a checkpoint with a model, and convert it if necessary"),
    ):
        sub = verbs.add_parser(verb, help=text)
        sub.add_argument("--model", required=True, help="the model's name")
        sub.add_argument("--builder", required=True, help="package.module:function")
        sub.add_argument("--kwargs", default="{}", help="the builder's arguments, as JSON")
        sub.add_argument("--format", required=True, help="a format's name")
        sub.add_argument("--out", type=Path, required=True, help="an empty folder")
        if verb == "make":
            sub.add_argument("--seed", type=int, default=0)
        else:
            sub.add_argument("--checkpoint", type=Path, required=True)
            _add_selection(sub)
    sub = verbs.add_parser("convert", help="write a checkpoint in another format or dtype")
    sub.add_argument("source", type=Path)
    sub.add_argument("target", type=Path)
    _add_selection(sub)
    sub.add_argument("--format", required=True, help="a format's name")
    sub.add_argument("--dtype", help="torch's name of it; default: each tensor's own")
    sub.add_argument("--max-shard-bytes", type=int, required=True)
    sub.add_argument("--verify", action="store_true")
    sub.add_argument("--model-keys", action="store_true", help="write a folder's model's keys")
    sub.add_argument("--trust-remote-code", action="store_true", help="run the folder's own code")
    sub.add_argument("--checksums", type=Path, help="a file with the source's checksums")
    return parser


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--key", default="", help="the state dict's place in nested dicts")
    parser.add_argument("--strip-prefix", default="", help="the beginning of names to remove")


if __name__ == "__main__":
    sys.exit(main())
