"""Make, index (compare with a model) or convert a checkpoint: ``python -m weighin.checkpoint``.

``child.run_child`` starts this module and sends it the request, whose field ``verb`` is make, index or convert.
The child answers with events: ``progress`` with the ``share`` done, and at last ``done``, with what a
conversion tells, or ``error``, with ``type``, ``message`` and ``repair``. The kernel kills the child when its
parent ends.
"""

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from weighin.cell import ModelSpec
from weighin.checkpoint import staging
from weighin.child_process import Parent, end_with_parent
from weighin.errors import CheckpointError
from weighin.stream.pretrained_library import Selection

_PROGRESS_EVERY_S: Final = 0.1


def main() -> int:
    end_with_parent()
    parent = Parent()
    if (request := parent.receive()) is None:  # the parent has ended
        return 1
    return parent.answer("done", lambda: answer(request, parent))


def answer(request: Mapping[str, Any], parent: Parent) -> dict[str, Any]:
    """Make, index or convert a checkpoint; return the fields of the event ``done``."""
    meter = Meter(parent, request["space"])
    hooks: dict[str, Any] = {"permit": meter.permit, "progress": meter.wrote}
    try:
        if request["verb"] == "convert":
            from weighin.checkpoint.convert import Conversion

            conversion = Conversion.of_request(request["conversion"])
            meter.rounds += conversion.verify  # every byte is written and then read back
            return conversion.write(**hooks)
        from weighin.checkpoint import truth  # imports torch

        spec = ModelSpec(**request["model"])
        hooks |= {"fmt": request["format"], "folder": Path(request["out"])}
        if request["verb"] == "make":
            truth.make(spec, seed=request["seed"], **hooks)
        else:
            hooks |= {"dtype": request["dtype"], "selection": Selection(**request["selection"])}
            truth.index(spec, checkpoint=Path(request["checkpoint"]), **hooks)
    except OSError as error:
        repair = "check that the folder is writable and has free space"
        raise CheckpointError(str(error), repair) from error
    return {}


class Meter:
    """Refuses to write where the disk lacks space, and reports the progress ten times a second."""

    def __init__(self, parent: Parent, space: Sequence[str]) -> None:
        self.rounds = 1
        self._parent, self._space = parent, space
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._reported_s = 0.0

    def permit(self, needed_bytes: int, read_bytes: int = 0) -> None:
        folder, what, repair = self._space
        staging.check_space(Path(folder), what, needed_bytes, repair)
        self._total = needed_bytes * self.rounds + read_bytes

    def wrote(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = time.monotonic()
            if now - self._reported_s >= _PROGRESS_EVERY_S:
                self._reported_s = now
                self._parent.send("progress", share=min(self._done / max(self._total, 1), 1.0))


if __name__ == "__main__":
    sys.exit(main())
