"""Turn an error into a cell's outcome and message, report both to weighin, and end the worker."""

import os
import sys
import traceback
from typing import NoReturn

from weighin.result import Outcome
from weighin.text import one_line
from weighin.worker.phases import Lifeline

BEFORE_LOAD = "before the load"
"""With these words begins the message of a failure that is not the strategy's."""
_LONGEST = 8000  # characters; a longer message would not fit into a packet


class StrategyFailed(Exception):
    """The strategy gave no model or no file, or raised the error in this exception's ``__cause__``."""


class UseFailed(Exception):
    """The use of the loaded model raised the error that is this exception's ``__cause__``."""


def classify(error: BaseException, strategy: str) -> tuple[Outcome, str]:
    """Return the outcome and the message of an error in a load, a save, its verification or a use."""
    from weighin.worker.verify import WrongWeights

    if isinstance(error, WrongWeights):
        return Outcome.WRONG_WEIGHTS, str(error)
    if isinstance(error, StrategyFailed) and error.__cause__ is None:
        return Outcome.STRATEGY_FAILED, str(error)
    cause = error.__cause__ if isinstance(error, StrategyFailed | UseFailed) else error
    assert cause is not None
    from weighin.worker.cuda import is_out_of_memory

    if is_out_of_memory(cause):
        return Outcome.CUDA_OOM, one_line(str(cause))
    if isinstance(error, UseFailed):
        return Outcome.USE_FAILED, f"{error}: {describe(cause)}"
    return Outcome.STRATEGY_FAILED, describe(cause, strategy)


def describe(error: BaseException, strategy: str = "") -> str:
    """Describe an error in one line, with the file and the line of code that raised the error.

    If the traceback contains the file ``strategy``, the result names the innermost line of this
    file instead. That line tells the strategy's author more than a line of torch.
    """
    from pathlib import Path

    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == strategy]
    place = "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in (own or frames)[-1:])
    text = one_line(str(error))
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


def fail(lifeline: Lifeline, outcome: Outcome, message: str, summary: str = "") -> NoReturn:
    """Report the failure, print the traceback to standard error, and end this process."""
    traceback.print_exc()
    lifeline.send("failed", outcome=outcome, message=message[:_LONGEST], summary=summary)
    sys.stderr.flush()
    os._exit(1)  # do not wait for the strategy's threads and exit handlers
