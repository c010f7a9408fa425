"""The fixtures of the tests in this folder: isolations, and cells to run under them."""

from cell_fixtures import (
    bench,
    cache_of_tests,
    isolation,
    limiting,
    process,
    seconds_to_load,
    strategies,
)

__all__ = [
    "bench", "cache_of_tests", "isolation", "limiting", "process", "seconds_to_load", "strategies",
]  # fmt: skip
