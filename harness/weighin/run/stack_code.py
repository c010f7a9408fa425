"""Add to each stack the source code of the innermost line in the user's own program."""

import linecache
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weighin.records.explanation.facts import own, read_all
from weighin.result import Stack
from weighin.text import one_line


def with_code(stacks: Sequence[Stack], folder: str, started_s: float) -> tuple[Stack, ...]:
    """Return the stacks with their lines of code.

    Paths are relative to ``folder``, the command's working folder. A stack gets no code if the file
    was written after ``started_s`` (seconds since the epoch), because other code may have run.
    """
    return tuple(replace(stack, code=_code(stack, folder, started_s)) for stack in stacks)


def _code(stack: Stack, folder: str, started_s: float) -> str:
    frame = own(read_all(stack.frames))
    if frame is None:
        return ""
    path = Path(folder, frame.path)
    try:
        is_as_it_ran = path.is_file() and path.stat().st_mtime <= started_s
    except OSError:
        return ""
    if not is_as_it_ran:
        return ""
    code, _, _comment = linecache.getline(str(path), frame.line).partition("  #")
    return one_line(code)
