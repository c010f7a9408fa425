"""Generate, index (compare with a model) or convert a checkpoint: ``python -m weighin.checkpoint``.

The module ``subprocess_client`` runs this module as a subprocess. The first line of standard input
is the request in JSON; its field ``verb`` is make, index or convert. The subprocess answers with
events, one JSON object on each line of standard output. Before it writes any tensor, it sends
``size``, with ``needed_bytes``, and waits for a line on standard input. Events ``progress`` have
``done_bytes`` and ``total_bytes``. The last event is ``done``, with ``seconds``, or ``error``, with
``type``, ``message`` and ``repair``. The kernel kills the subprocess when its parent ends.
"""

import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weighin.cell import ModelSpec
from weighin.child_process import Parent, end_with_parent
from weighin.errors import CheckpointError, HarnessError
from weighin.formats.pretrained_library import Selection

_PROGRESS_EVERY_S: Final = 0.1


def main() -> int:
    end_with_parent()
    parent = Parent()
    if (request := parent.receive()) is None:  # the parent has ended
        return 1
    try:
        seconds = answer(json.loads(request), parent)
    except OSError as error:
        repair = "check that the folder is writable and has free space"
        return _fail(parent, CheckpointError(str(error), repair))
    except HarnessError as error:
        return _fail(parent, error)
    parent.send("done", seconds=seconds)
    return 0


def _fail(parent: Parent, error: HarnessError) -> int:
    parent.send("error", type=type(error).__name__, message=error.message, repair=error.repair)
    return error.exit_code


def answer(request: Mapping[str, Any], parent: Parent) -> dict[str, float]:
    """Make, index or convert a checkpoint; return the seconds of each stage."""
    import_start = time.monotonic()
    import torch  # noqa: F401 (its import is a stage of its own)

    if request["verb"] == "convert":
        from weighin.checkpoint.convert import Conversion
    else:
        from weighin.checkpoint import generate, index

    import_s = time.monotonic() - import_start
    meter = _Meter(parent, rounds=2 if request.get("verify") else 1)
    hooks: dict[str, Any] = {"permit": meter.permit, "progress": meter.wrote}
    if request["verb"] == "convert":
        return {"import": import_s} | Conversion.of_request(request).write(**hooks)
    spec = ModelSpec(**request["model"])
    hooks |= {"fmt": request["format"], "folder": Path(request["out"])}
    if request["verb"] == "make":
        return {"import": import_s, **generate.make(spec, seed=request["seed"], **hooks).seconds}
    checkpoint = Path(request["checkpoint"])
    hooks |= {"dtype": request["dtype"], "selection": Selection(**request["selection"])}
    indexed = index.index(spec, checkpoint=checkpoint, **hooks)
    return {"import": import_s, **indexed.seconds}


class _Meter:
    """Asks the parent for permission to write, and reports the progress at most ten times a second.

    ``rounds`` is 2 if every byte is written and then read back, and so counts twice; else 1.
    """

    def __init__(self, parent: Parent, rounds: int = 1) -> None:
        self._parent = parent
        self._rounds = rounds
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._reported_s = 0.0

    def permit(self, needed_bytes: int) -> None:
        self._total = needed_bytes * self._rounds
        self._parent.send("size", needed_bytes=needed_bytes)
        if self._parent.receive() is None:  # the parent refused the size, or has ended
            sys.exit(0)

    def wrote(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = time.monotonic()
            if now - self._reported_s >= _PROGRESS_EVERY_S:
                self._reported_s = now
                self._parent.send("progress", done_bytes=self._done, total_bytes=self._total)


if __name__ == "__main__":
    sys.exit(main())
