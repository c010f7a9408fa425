"""Find change points: the indices at which the level of a sequence of figures changes.

The package ruptures finds change points with the algorithm PELT (Killick, Fearnhead and Eckley,
2012) and least squares. The penalty for each change point is the largest of three values: 1, the BIC
penalty for the noise of the figures, and the square of the change that ``weighin check`` tolerates.
The longer a change lasts, the smaller it may be to outweigh this penalty.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from weighin.errors import extra

_MAD_TO_SIGMA: Final = 1.4826  # sigma / median absolute deviation of a normal distribution


def find_steps(figures: Sequence[int], allowance: int, least_runs: int) -> list[int]:
    """Return the index of the first figure of each new level.

    Each level lasts for at least ``least_runs`` figures. A change that lasts for one figure must be
    larger than ``allowance``; a change that lasts longer may be smaller.

    Raises:
        ConfigError: ruptures is not installed.
    """
    if len(figures) < 2 * least_runs:
        return []
    with extra("history", "history"):
        import ruptures  # an optional dependency: 150 MB with scipy
    signal = np.asarray(figures, dtype=float)
    changes = np.diff(signal)
    # A single large change hardly affects the median absolute deviation of all changes.
    spread = float(np.median(np.abs(changes - np.median(changes))))
    sigma = _MAD_TO_SIGMA * spread / np.sqrt(2)
    penalty = max(2 * sigma**2 * np.log(len(signal)), float(allowance) ** 2, 1.0)
    search = ruptures.Pelt(model="l2", min_size=least_runs, jump=1).fit(signal.reshape(-1, 1))
    ends: list[int] = search.predict(pen=penalty)
    return ends[:-1]  # the last element is the length of the sequence
