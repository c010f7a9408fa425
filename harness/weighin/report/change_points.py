"""Where a sequence of figures changes its level: change points.

By PELT (Killick, Fearnhead and Eckley, 2012) with least squares, as ruptures has it. The penalty of
a step is the larger of BIC's, for the noise that the figures show, and the square of what the gate
allows a metric to change: what a check must not alarm of, is no step either.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from weighin.errors import extra

_MAD_TO_SIGMA: Final = 1.4826  # of a normal distribution


def find_steps(figures: Sequence[int], allowance: int, least_runs: int) -> list[int]:
    """Return where a sequence of figures changes its level: the first index of each new level.

    ``allowance`` is the change that is never a step between two runs; ``least_runs`` how many runs
    a level must last.

    Raises:
        ConfigError: ruptures is not installed.
    """
    if len(figures) < 2 * least_runs:
        return []
    with extra("history", "history"):
        import ruptures  # with scipy: 150 MB that measuring does not need
    signal = np.asarray(figures, dtype=float)
    changes = np.diff(signal)
    # The spread of the changes around their median: a step is one change, and does not move it.
    spread = float(np.median(np.abs(changes - np.median(changes))))
    sigma = _MAD_TO_SIGMA * spread / np.sqrt(2)
    penalty = max(2 * sigma**2 * np.log(len(signal)), float(allowance) ** 2, 1.0)
    search = ruptures.Pelt(model="l2", min_size=least_runs, jump=1).fit(signal.reshape(-1, 1))
    found: list[int] = search.predict(pen=penalty)
    return found[:-1]  # the last is the end
