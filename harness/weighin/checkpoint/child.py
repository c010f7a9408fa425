"""Run ``python -m weighin.checkpoint``, the child that makes, indexes or converts a checkpoint."""

import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weighin import child_process
from weighin.errors import CheckpointError

Report = Callable[[str, float | None], None]
"""A function that shows the current step's text, and its share done: 0 to 1, None if unknown."""


def run_child(
    request: Mapping[str, Any], *, report: Callable[[float], None], python_path: Iterable[str] = ()
) -> dict[str, Any]:
    """Run a child to its end with a request; return the fields of its event ``done``.

    The request's ``space`` has a folder, what is written there, and the repair if its disk lacks space.
    ``report`` gets the share done. Raises HarnessError if the child sent one, failed or was killed.
    """
    command = child_process.module("weighin.checkpoint")
    with child_process.Child(command, child_process.environment(python_path)) as child:
        child.send("request", **request)
        while (event := child.receive()) and event["event"] == "progress":
            report(event["share"])
        done = child_process.fields_of(event) if event else None
        code = child.wait()
        if done is not None:
            return done
        lines = child_process.printed_lines(child.printed)[-3:]
    end = f"ended with exit code {code}"
    repair = (
        "if the model's builder raised this, correct the builder; if memory ran out, choose a smaller"
        " model (weighin predict tells how much a model needs)"
    )
    if code < 0:
        end = f"was killed by {signal.Signals(-code).name}"
        repair = "run weighin again; if the kernel did it (see `dmesg`), free some memory first"
    output = f": {' | '.join(line.strip() for line in lines)}" if lines else ""
    raise CheckpointError(f"the process that prepares the checkpoint {end}{output}", repair)
