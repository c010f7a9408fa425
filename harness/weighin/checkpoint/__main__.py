"""Make, index (compare with a model) or convert a checkpoint: ``python -m weighin.checkpoint``.

``child.run_child`` starts this module and sends it the request, whose field ``verb`` is make, index or convert.
The child answers with events: ``progress`` with the ``share`` done, and at last ``done`` or ``error``.
The kernel kills the child when its parent ends.
"""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import convert

from weighin.cell import ModelSpec
from weighin.checkpoint import temporary_folders
from weighin.child_process import Parent, end_with_parent
from weighin.stream.pretrained_library import Selection


def main() -> int:
    end_with_parent()
    parent = Parent()
    if (request := parent.receive()) is None:  # the parent has ended
        return 1
    return parent.answer("done", lambda: answer(request, parent))


def answer(request: Mapping[str, Any], parent: Parent) -> dict[str, Any]:
    """Make, index or convert a checkpoint; return the fields of the event ``done``."""
    space, what, repair = request["space"]
    with ExitStack() as ending:

        def permit(to_write: int, to_read: int) -> None:
            """Refuse to write where the disk lacks space; from now on, report the progress."""
            temporary_folders.check_space(Path(space), what, to_write, repair)
            ending.enter_context(_reporting(parent, to_write + to_read))

        if request["verb"] == "convert":
            from weighin.checkpoint.convert import Conversion

            fields = request["conversion"]
            conversion = convert(fields, Conversion, dec_hook=lambda kind, text: kind(text))
            return conversion.write(permit)
        from weighin.checkpoint import generate  # imports torch

        spec = ModelSpec(**request["model"])
        options = {"fmt": request["format"], "folder": Path(request["out"]), "permit": permit}
        if request["verb"] == "make":
            generate.make(spec, seed=request["seed"], **options)
        else:
            options |= {"dtype": request["dtype"], "selection": Selection(**request["selection"])}
            generate.index(spec, checkpoint=Path(request["checkpoint"]), **options)
    return {}


@contextmanager
def _reporting(parent: Parent, total_bytes: int) -> Iterator[None]:
    """Report ten times a second how much of ``total_bytes`` this process has read and written."""
    ended = threading.Event()

    def report() -> None:
        with suppress(OSError):  # a kernel that does not count them
            before = _moved_bytes()
            while not ended.wait(0.1):
                share = (_moved_bytes() - before) / max(total_bytes, 1)
                parent.send("progress", share=min(share, 1.0))

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:  # before the last event is sent
        ended.set()
        thread.join()


def _moved_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


if __name__ == "__main__":
    sys.exit(main())
