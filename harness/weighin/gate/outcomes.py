"""How every series ended, judged: what is not ok fails, unless that is expected of it.

Wrong weights and a strategy that fails are never expected, and fail even where nothing covers
them. A baseline covers all series, a budget those that it names.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weighin.exit_codes import BROKEN
from weighin.gate.budgets import Budget
from weighin.gate.expected import Expectation, is_expected
from weighin.gate.lines import Line, LineVerdict
from weighin.records.series import Series


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What ended how, and what was expected. ``before`` is None where there is no baseline."""

    before: Mapping[str, Series] | None
    now: Mapping[str, Series]
    budgets: Sequence[Budget] = ()
    expected: Sequence[Expectation] = ()

    def lines(self) -> Iterator[Line]:
        """Yield a line for each series; of an ok one without a baseline only where it is news."""
        for name in dict.fromkeys([*(self.before or {}), *self.now]):
            was, now = (self.before or {}).get(name), self.now.get(name)
            if now is None:
                assert was is not None
                text = f"was not measured; {was.outcome} in the baseline"
                yield Line(LineVerdict.MISSING, name, "outcome", text)
            elif now.is_ok:
                yield from self._ok(name, was)
            else:
                yield from self._not_ok(name, was, now)

    def notes(self) -> Iterator[str]:
        """Yield what was expected of nothing, and what failed without being judged."""
        for one in self.expected:
            if not any(one.covers(name) for name in self.now):
                yield f"nothing that was measured is meant by {one.source} {one}"
        left = [
            f"{name} ({one.outcome})"
            for name, one in self.now.items()
            if not one.is_ok and not self._is_judged(name, one)
        ]
        if left:
            yield f"not judged, for no budget covers them: {', '.join(left)}"

    def _ok(self, name: str, was: Series | None) -> Iterator[Line]:
        vain = next((one for one in self._in_vain() if one.covers(name)), None)
        if vain or (was and not was.is_ok):
            before = was.outcome if was and not was.is_ok else f"{vain.outcome} expected" if vain else ""  # fmt: skip
            repair = f"; take {str(vain)!r} out of {vain.source}" if vain else ""
            yield Line(LineVerdict.IMPROVED, name, "outcome", f"{before} -> ok{repair}")
        elif was:
            yield Line(LineVerdict.SAME, name, "outcome", "ok", excess=-math.inf)
        elif self.before is not None:
            yield Line(LineVerdict.NEW, name, "outcome", "not in the baseline; ok")

    def _not_ok(self, name: str, was: Series | None, now: Series) -> Iterator[Line]:
        if not self._is_judged(name, now):
            return
        if is_expected(name, now, self.expected):
            yield Line(LineVerdict.EXPECTED, name, "outcome", now.outcome)
            return
        text = now.outcome
        if was and was.outcome != now.outcome:
            text = f"{was.outcome} -> {now.outcome}"
        elif self.before is not None and not was:
            text += ", and not in the baseline"
        if now.message:
            text += f": {now.message}"
        verdict = LineVerdict.REGRESSED if was and was.is_ok else LineVerdict.NOT_OK
        yield Line(verdict, name, "outcome", text)

    def _is_judged(self, name: str, now: Series) -> bool:
        return (
            self.before is not None
            or bool(now.failures & {*BROKEN})
            or is_expected(name, now, self.expected)
            or any(budget.covers(name) for budget in self.budgets)
        )

    def _in_vain(self) -> list[Expectation]:
        """Return the expectations whose outcome no series has that they mean."""
        return [
            one
            for one in self.expected
            if not any(
                one.covers(name) and one.outcome in s.failures for name, s in self.now.items()
            )
        ]
