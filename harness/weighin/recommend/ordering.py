"""In which order to try what was judged: the measured fastest first."""

from collections.abc import Sequence
from typing import Final

from weighin.recommend.ranking import MEASURED, Candidate, FitVerdict

_DOUBT_TIMES: Final = 2.0
"""How much faster a prediction must be than what was measured: it is as rough as this."""
_SAME_TIME: Final = 1.1
"""Predicted times within this factor are one: what is predicted of two loads errs alike for both."""


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return them in the order in which to try them: by verdict, then by ready time.

    A time that was measured here comes before a predicted one, unless that is less than half of
    it. What a way of loading asks for, and what it needs, only decides among what is as fast as the
    fastest: within the noise of its repeats, or, where nothing was measured, a tenth.
    """
    return [
        one
        for verdict in FitVerdict
        for one in _in_order([each for each in candidates if each.verdict is verdict])
    ]


def _in_order(alike: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates of one verdict in their order."""
    is_any_measured = any(one.time_from == MEASURED for one in alike)

    def counted_s(one: Candidate) -> float:
        if one.ready_s is None:
            return float("inf")
        is_doubted = is_any_measured and one.time_from != MEASURED
        return one.ready_s * _DOUBT_TIMES if is_doubted else one.ready_s

    fastest = min(alike, key=counted_s, default=None)
    as_fast_s = _as_fast_s(fastest, counted_s(fastest)) if fastest else 0.0

    def key(one: Candidate) -> tuple[object, ...]:
        time_s = counted_s(one)
        if one.verdict is FitVerdict.THRASHES:  # its time under one limit is not that under another
            return len(one.asks), one.need_bytes or 0, time_s, one.strategy
        is_slower = time_s > as_fast_s
        is_doubted = is_any_measured and one.time_from != MEASURED
        little = (0, 0) if is_slower else (len(one.asks), one.need_bytes or 0)
        return is_slower, is_doubted and not is_slower, *little, time_s, one.strategy

    return sorted(alike, key=key)


def _as_fast_s(fastest: Candidate, time_s: float) -> float:
    """Return the time up to which others are as fast."""
    if fastest.time_from == MEASURED:
        return time_s + (fastest.noise_s or 0.0)
    return time_s * _SAME_TIME
