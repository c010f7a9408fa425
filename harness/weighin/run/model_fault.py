"""Test, by a load without the strategy, whether a failed forward pass is the model's fault."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from signal import SIGKILL, Signals

from weighin import child_process
from weighin.cell import Job
from weighin.exit_codes import BROKEN
from weighin.formats.selection import Selection
from weighin.protocol import encode_job
from weighin.result import Outcome, Result


def is_right_load(result: Result) -> bool:
    """Return whether a cell failed only in its forward pass, after every weight was verified."""
    is_ready = result.ready_ns is not None
    return result.outcome in BROKEN and is_ready and result.last_phase == "forward"


def failure(job: Job, checkpoint: Path, selection: Selection) -> str | None:
    """Load the model by plain torch code, and return the error of a forward pass after this load.

    ``failure`` returns an empty text if the forward pass works. ``failure`` returns None if the
    load fails, the process exceeds the job's time-out, or SIGKILL ends it, because no forward pass
    was then tested.
    """
    question = {"checkpoint": str(checkpoint), "selection": asdict(selection)}
    try:
        asked = child_process.ask(
            child_process.module("weighin.worker.reference"),
            child_process.environment(job.python_path),
            encode_job(job) + json.dumps(question).encode() + b"\n",
            job.timeout_s,
        )
    except TimeoutError:
        return None
    if asked.code < 0 and asked.code != -SIGKILL:
        return f"it ends with {Signals(-asked.code).name}"
    return str(asked.events[-1]["failure"]) if asked.code == 0 else None


def blamed(result: Result, how: str) -> Result:
    """Change the result to ok, with a warning that the model's own forward pass fails (``how``)."""
    warning = (
        f"the forward pass of {result.cell.model.title} fails, also after a load without the"
        f" strategy: {how}. Every weight is right. To measure the load alone: --use none"
    )
    return replace(
        result,
        outcome=Outcome.OK,
        message="",
        last_phase=None,
        warnings=(*result.warnings, warning),
    )
