"""Explain the exit codes of ``weighin``, and compute a run's exit code from the cells' outcomes.

A cell (measurement) that was killed for lack of memory, or that timed out, is a valid result.
"""

from collections.abc import Iterable
from typing import Final

from weighin.result import Outcome, Result
from weighin.units import format_exact

GATE_FAILED: Final = 1
MEASUREMENT_FAILED: Final = 4
STRATEGY_FAILED: Final = 5

BROKEN: Final = (
    Outcome.WRONG_WEIGHTS,
    Outcome.STRATEGY_FAILED,
    Outcome.COMMAND_FAILED,
    Outcome.USE_FAILED,
)
"""Outcomes that show a fault of the strategy, command or use, and not a limit that is too small."""

MEANINGS: Final = {
    0: "done (a cell killed for lack of memory is a valid result)",
    1: "a comparison of `weighin check` failed, no strategy fits into the memory, or the user"
    " declined a confirmation",
    2: "bad input",
    3: "the isolation that limits the memory of the measured processes does not work on this"
    " machine",
    4: "a cell (one measurement) could not be made, or another run is measuring on this machine",
    5: "a strategy loaded wrong weights or failed, a use of the loaded model failed, or one of"
    " several measured commands failed",
    130: "stopped by Ctrl-C, SIGTERM or SIGHUP",
}
EXPLAINED: Final = f"Exit codes: {'; '.join(f'{code} {why}' for code, why in MEANINGS.items())}."


def of_results(results: Iterable[Result]) -> int:
    """Return a run's exit code: 5 if an outcome is in ``BROKEN``, else 4 if a measurement could not
    be made, else 0.

    After only one measurement, ``weighin run`` exits with the command's own code instead.
    """
    outcomes = {result.outcome for result in results}
    if outcomes & {*BROKEN}:
        return STRATEGY_FAILED
    return MEASUREMENT_FAILED if Outcome.MEASUREMENT_FAILED in outcomes else 0


def broken(results: Iterable[Result]) -> list[str]:
    """Return a line with the strategy, RAM limit, outcome and message of each result whose outcome
    is in ``BROKEN``; equal lines appear once.
    """
    lines = []
    for result in results:
        if result.outcome in BROKEN:
            limit = result.cell.ram_limit_bytes
            under_limit = f" under {format_exact(limit)}" if limit else ""
            message = f": {result.message}" if result.message else ""
            lines.append(f"{result.cell.strategy}{under_limit}: {result.outcome}{message}")
    return list(dict.fromkeys(lines))
