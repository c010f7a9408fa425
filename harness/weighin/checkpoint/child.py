"""Run ``python -m weighin.checkpoint``, the child that makes, indexes or converts a checkpoint."""

import re
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from weighin import child_process
from weighin.errors import CheckpointError
from weighin.units import format_bytes

Report = Callable[[str, float | None], None]
"""A function that shows the current step's text, and its share done: 0 to 1, None if unknown."""

_REFUSED: Final = re.compile(
    r"can't allocate memory: you tried to allocate (\d+) bytes|^MemoryError()"
)
"""The last line of a process that got no memory, of torch or of Python."""
_LAST_LINES: Final = 3


def run_child(
    request: Mapping[str, Any],
    *,
    report: Callable[[float], None],
    python_path: Iterable[str] = (),
) -> dict[str, Any]:
    """Run a child with a request; return the fields of its event ``done``.

    The request's ``space`` has a folder, what is written there, and the repair if its disk lacks space.
    ``report`` is called with the share done. The child ends before this function returns.
    HarnessError: the child sent one, or was killed.
    """
    command = child_process.module("weighin.checkpoint")
    with child_process.Child(command, child_process.environment(python_path)) as child:
        child.send("request", **request)
        done: dict[str, Any] | None = None
        while (event := child.receive()) is not None:
            if event["event"] == "error":
                raise child_process.error_in(event)
            if event["event"] == "progress":
                report(event["share"])
            elif event["event"] == "done":
                done = event
        code = child.wait()
        if done is None:
            raise _died(code, child_process.printed_lines(child.printed)[-_LAST_LINES:])
        return done


def _died(code: int, lines: list[str]) -> CheckpointError:
    if lines and (refused := _REFUSED.search(lines[-1])):
        size = f" {format_bytes(int(refused[1]))} at once" if refused[1] else ""
        return CheckpointError(
            f"to make the checkpoint, the model needs{size or ' more memory'}, which this machine has not",
            "give a smaller model; weighin predict tells the memory of a model without making it",
        )
    end, repair = f"ended with exit code {code}", "if the model's builder raised this, correct it"
    if code < 0:
        end = f"was killed by {signal.Signals(-code).name}"
        repair = "run it again; if the kernel killed it (see `dmesg`), free some memory first"
    output = f": {' | '.join(line.strip() for line in lines)}" if lines else ""
    return CheckpointError(f"the process that prepares the checkpoint {end}{output}", repair)
