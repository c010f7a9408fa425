"""Running the maker's process from the parent: without torch, with errors as exceptions."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, Final

import weighin
from weighin.errors import CheckpointError, ConfigError, HarnessError, UnknownName

_ERRORS: Final = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}
_LAST_LINES: Final = 3


def run_maker(
    arguments: Sequence[str],
    *,
    permit: Callable[[int], None],
    report: Callable[[int, int], None],
    python_path: Iterable[str] = (),
) -> dict[str, float]:
    """Run ``python -m weighin.checkpoint`` to its end; return its seconds by stage.

    ``permit`` gets the bytes that will be written before the first one is, and raises to refuse;
    ``report`` gets the bytes done and in all. The process never outlives this call.

    Raises:
        HarnessError: whatever the maker raised, or that it was killed.
    """
    with tempfile.TemporaryFile() as stderr_tail:
        process = subprocess.Popen(
            [sys.executable, "-m", "weighin.checkpoint", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr_tail,
            env=environment(python_path),
            text=True,
        )
        try:
            assert process.stdin and process.stdout
            done = _follow(process.stdout, process.stdin, permit, report)
            process.wait()
        finally:
            process.kill()  # nothing to end where it has ended by itself
            process.communicate()
        if done is None:
            raise _died(process.returncode, stderr_tail)
        return done


def _follow(
    lines: IO[str],
    answers: IO[str],
    permit: Callable[[int], None],
    report: Callable[[int, int], None],
) -> dict[str, float] | None:
    done: dict[str, float] | None = None
    for line in lines:
        event = _decode(line)
        if event is None:
            continue  # a builder that prints
        if "error" in event:
            raise _error(event["error"])
        if event["event"] == "size":
            permit(event["needed_bytes"])
            answers.write("\n")
            answers.flush()
        elif event["event"] == "progress":
            report(event["done_bytes"], event["total_bytes"])
        elif event["event"] == "done":
            done = event["seconds"]
    return done


def _decode(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    known = isinstance(event, dict) and ("event" in event or "error" in event)
    return event if known else None


def _error(fields: dict[str, str]) -> HarnessError:
    kind = ConfigError if fields["type"] == UnknownName.__name__ else _ERRORS.get(fields["type"])
    return (kind or HarnessError)(fields["message"], fields["repair"])


def _died(code: int, stderr_tail: IO[bytes]) -> CheckpointError:
    stderr_tail.seek(0)
    lines = stderr_tail.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
    if code < 0:
        cause = f"killed by {signal.Signals(-code).name}"
        repair = "run it again; if the kernel killed it (see `dmesg`), free some memory first"
    else:
        cause = f"stopped with exit code {code}"
        repair = "correct the model's builder, if this is its error; else report these lines"
    said = f": {' | '.join(line.strip() for line in lines)}" if lines else ""
    return CheckpointError(f"the process that prepares the checkpoint was {cause}{said}", repair)


def environment(python_path: Iterable[str]) -> dict[str, str]:
    """Return the environment of a process that imports this package and a user's builders."""
    ours = str(Path(weighin.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [*python_path, ours, *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
