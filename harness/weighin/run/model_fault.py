"""Tell whether a failed forward pass is the fault of the model, and not of the load before it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL, Signals

from weighin.cell import Job
from weighin.checkpoint.subprocess_client import environment
from weighin.exit_codes import BROKEN
from weighin.formats.selection import Selection
from weighin.protocol import encode_job
from weighin.record import Outcome, Result


def is_right_load(result: Result) -> bool:
    """Tell whether a cell failed only in its forward pass, after every weight was verified."""
    is_ready = result.ready_ns is not None
    return result.outcome in BROKEN and is_ready and result.last_phase == "forward"


def failure(job: Job, checkpoint: Path, selection: Selection) -> str | None:
    """Return how the forward pass fails after the reference load; empty if it works.

    None means that nobody can say, because the reference load failed or the kernel killed it.
    """
    command = [sys.executable, "-m", "weighin.worker.reference", *selection.options]
    try:
        asked = subprocess.run(
            [*command, "--", str(checkpoint)],
            input=encode_job(job),
            capture_output=True,
            env=environment(job.python_path),
            timeout=job.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if asked.returncode < 0 and asked.returncode != -SIGKILL:
        return f"it ends with {Signals(-asked.returncode).name}"
    return str(json.loads(asked.stdout)["failure"]) if asked.returncode == 0 else None


def blamed(result: Result, how: str) -> Result:
    """Return the result of a right load whose model's forward pass fails as ``how`` says."""
    warning = (
        f"the forward pass of {result.cell.model.title} fails, after the reference load as well: {how}."
        " Every weight is right. To measure the load alone: --passes 0"
    )
    return replace(
        result,
        outcome=Outcome.OK,
        message="",
        last_phase=None,
        warnings=(*result.warnings, warning),
    )
