"""Find change points: the places where a sequence of figures changes its level.

The method is PELT (Killick, Fearnhead and Eckley, 2012) with least squares, from the package
ruptures. The penalty of a step is the larger of two values: the BIC penalty for the noise of the
figures, and the square of the change that ``weighin check`` tolerates. A tolerated change is
therefore not a step.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from weighin.errors import extra

_MAD_TO_SIGMA: Final = 1.4826  # of a normal distribution


def find_steps(figures: Sequence[int], allowance: int, least_runs: int) -> list[int]:
    """Return the first index of each new level in a sequence of figures.

    ``allowance`` is the largest change between two runs that is never a step; ``least_runs`` is the
    minimum number of runs for which a level must last.

    Raises:
        ConfigError: ruptures is not installed.
    """
    if len(figures) < 2 * least_runs:
        return []
    with extra("history", "history"):
        import ruptures  # 150 MB with scipy, an extra because measuring does not need it
    signal = np.asarray(figures, dtype=float)
    changes = np.diff(signal)
    # The median absolute deviation of the changes, which a step (a single change) hardly affects.
    spread = float(np.median(np.abs(changes - np.median(changes))))
    sigma = _MAD_TO_SIGMA * spread / np.sqrt(2)
    penalty = max(2 * sigma**2 * np.log(len(signal)), float(allowance) ** 2, 1.0)
    search = ruptures.Pelt(model="l2", min_size=least_runs, jump=1).fit(signal.reshape(-1, 1))
    ends: list[int] = search.predict(pen=penalty)
    return ends[:-1]  # the last is the end
