"""Order strategies by verdict, so that those that fit come first, and then by the time of the load."""

from collections.abc import Sequence
from typing import Final

from weighin.recommend.candidates import MEASURED, SAVED_AS, Candidate, FitVerdict

_DOUBT_TIMES: Final = 2.0
"""A strategy with a predicted time precedes a measured one only if it is faster by this factor."""
_SAME_TIME: Final = 1.2
"""Predicted times within this factor count as equal, because predictions are no more accurate."""
_CONVERSION_S: Final = 1.0
"""A conversion takes this time, and as long as a load: that much longer a predicted load counts."""


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the strategies from the best to the worst: by verdict, then by the time of the load.

    If any strategy of a verdict was measured, predicted times count double. Strategies about as fast
    as the fastest one are ordered: measured before predicted, without a conversion of the checkpoint
    before with one, then by their number of other requirements, then by RAM. "About as fast" means
    within ``noise_s`` of the fastest one, or within 20 % if that was not measured. Strategies that
    thrash are ordered by requirements and RAM before the time.
    """
    return [
        one
        for verdict in FitVerdict
        for one in _by_time([each for each in candidates if each.verdict is verdict])
    ]


def _by_time(alike: Sequence[Candidate]) -> list[Candidate]:
    """Return the strategies of one verdict from the best to the worst."""
    is_any_measured = any(one.time_from == MEASURED for one in alike)

    def counted_s(candidate: Candidate) -> float:
        if candidate.ready_s is None:
            return float("inf")
        if candidate.time_from == MEASURED:
            return candidate.ready_s
        time_s = candidate.ready_s * (_DOUBT_TIMES if is_any_measured else 1)
        return 2 * time_s + _CONVERSION_S if _demands(candidate)[0] else time_s

    fastest = min(alike, key=counted_s, default=None)
    as_fast_s = _as_fast_s(fastest, counted_s(fastest)) if fastest else 0.0

    def key(candidate: Candidate) -> tuple[object, ...]:
        time_s = counted_s(candidate)
        # A load that thrashes takes another time under each limit, so its time decides last.
        if candidate.verdict is FitVerdict.THRASHES:
            return *_demands(candidate), time_s, candidate.strategy
        is_slower = time_s > as_fast_s
        is_doubted = is_any_measured and candidate.time_from != MEASURED
        demands = (0, 0, 0) if is_slower else _demands(candidate)
        return is_slower, is_doubted and not is_slower, *demands, time_s, candidate.strategy

    return sorted(alike, key=key)


def _demands(candidate: Candidate) -> tuple[int, int, int]:
    """Return the number of conversions, then of other requirements such as packages, then the RAM."""
    conversions = sum(asked.startswith(SAVED_AS) for asked in candidate.asks)
    return conversions, len(candidate.asks) - conversions, candidate.need_bytes or 0


def _as_fast_s(fastest: Candidate, time_s: float) -> float:
    """Return the longest time in seconds that counts as equal to the time of the fastest strategy."""
    if fastest.time_from == MEASURED:
        return time_s + (fastest.noise_s or 0.0)
    return time_s * _SAME_TIME
