"""How a cell fails: what an error means, in one line, and the worker's last words."""

import os
import sys
import traceback
from typing import NoReturn

from weighin.record import Outcome
from weighin.text import one_line
from weighin.worker.connection import Lifeline


class StrategyFailed(Exception):
    """The strategy raised (then that is the ``__cause__``), or returned no model."""


def classify(error: BaseException, strategy: str) -> tuple[Outcome, str]:
    """Return what an error during the load, the touch or the verification means."""
    from weighin.worker.verify import WrongWeights

    if isinstance(error, WrongWeights):
        return Outcome.WRONG_WEIGHTS, str(error)
    if isinstance(error, StrategyFailed) and error.__cause__ is None:
        return Outcome.STRATEGY_FAILED, str(error)
    cause = error.__cause__ if isinstance(error, StrategyFailed) else error
    assert cause is not None
    from weighin.worker.cuda import is_out_of_memory

    if is_out_of_memory(cause):
        return Outcome.CUDA_OOM, one_line(str(cause))
    return Outcome.STRATEGY_FAILED, describe(cause, strategy)


def describe(error: BaseException, strategy: str = "") -> str:
    """Return an error in one line, with the place that raised it.

    That is the innermost line of the strategy's own file, where it came through there: a line of
    torch tells its author nothing.
    """
    from pathlib import Path

    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == strategy]
    place = "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in (own or frames)[-1:])
    text = one_line(str(error))
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


def fail(lifeline: Lifeline, outcome: Outcome, message: str, summary: str = "") -> NoReturn:
    """Report how this cell failed, leave the traceback among the stderr_tail, and end."""
    traceback.print_exc()
    lifeline.send("failed", outcome=outcome, message=message, summary=summary)
    sys.stderr.flush()
    os._exit(1)  # at once: a strategy's threads and exit handlers have nothing to add
