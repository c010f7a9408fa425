"""Run ``python -m weighin.checkpoint`` from the parent, and turn its errors into exceptions."""

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
from weighin.errors import CheckpointError, ConfigError, FormatLimit, HarnessError, UnknownName
from weighin.suite.registry import data_folder

_ERRORS: Final = {kind.__name__: kind for kind in (ConfigError, CheckpointError, FormatLimit)}
_LAST_LINES: Final = 3


def run_maker(
    arguments: Sequence[str],
    *,
    permit: Callable[[int], None],
    report: Callable[[int, int], None],
    python_path: Iterable[str] = (),
) -> dict[str, float]:
    """Run ``python -m weighin.checkpoint`` to its end; return the seconds of each stage.

    ``permit`` is called with the number of bytes to write before the first byte is written, and
    raises an exception to refuse. ``report`` is called with the bytes done and the total. The
    subprocess ends before this function returns.

    Raises:
        HarnessError: the subprocess raised this error, or it was killed.
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
            process.kill()  # no effect if the process has ended
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
            continue  # a line that a model's builder printed
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
    is_event = isinstance(event, dict) and ("event" in event or "error" in event)
    return event if is_event else None


def _error(fields: dict[str, str]) -> HarnessError:
    kind = ConfigError if fields["type"] == UnknownName.__name__ else _ERRORS.get(fields["type"])
    return (kind or HarnessError)(fields["message"], fields["repair"])


def _died(code: int, stderr_tail: IO[bytes]) -> CheckpointError:
    stderr_tail.seek(0)
    lines = stderr_tail.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
    if code < 0:
        end = f"was killed by {signal.Signals(-code).name}"
        repair = "run it again; if the kernel killed it (see `dmesg`), free some memory first"
    else:
        end = f"ended with exit code {code}"
        repair = "if the model's builder raised this error, correct it; else report these lines"
    output = f": {' | '.join(line.strip() for line in lines)}" if lines else ""
    return CheckpointError(f"the process that prepares the checkpoint {end}{output}", repair)


def environment(python_path: Iterable[str]) -> dict[str, str]:
    """Return the environment of a process that can import this package and a user's builders."""
    ours = (Path(weighin.__file__).resolve().parents[1], data_folder("strategies").parent)
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [*python_path, *map(str, ours), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
