"""Judge outcomes: a measurement with an outcome other than ok fails unless the outcome is expected.

Without a baseline file, only measurements with a budget or an expected outcome are judged. Wrong
weights and failed strategies always fail, even if the user expects them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weighin.gate.budgets import Budget
from weighin.gate.expected import Expectation, is_expected
from weighin.gate.lines import Line, LineVerdict
from weighin.records.series import Series
from weighin.result import BROKEN


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The measurements to judge (``now``) and the baseline file's (``before``; None without a file)."""

    before: Mapping[str, Series] | None
    now: Mapping[str, Series]
    budgets: Sequence[Budget] = ()
    expected: Sequence[Expectation] = ()

    def lines(self) -> Iterator[Line]:
        """Yield a line for the outcome of each judged measurement.

        Without a baseline file, an ok measurement gets a line only if a failure was expected.
        """
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
        """Yield notes on expected outcomes that match no measurement, and on failures that are not judged."""
        for each in self.expected:
            if not any(each.covers(name) for name in self.now):
                yield f"{each.source} {each} matches no measured series"
        left = [
            f"{name} ({series.outcome})"
            for name, series in self.now.items()
            if not series.is_ok and not self._is_judged(name, series)
        ]
        if left:
            yield f"these failures are not judged, because no budget covers them: {', '.join(left)}"

    def _ok(self, name: str, was: Series | None) -> Iterator[Line]:
        unmet = next((each for each in self._unmet() if each.covers(name)), None)
        if unmet or (was and not was.is_ok):
            before = was.outcome if was and not was.is_ok else f"{unmet.outcome} expected" if unmet else ""  # fmt: skip
            repair = f"; remove {str(unmet)!r} from {unmet.source}" if unmet else ""
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

    def _unmet(self) -> list[Expectation]:
        """Return the expected outcomes with which no repeat of a matching measurement ended."""
        return [
            each
            for each in self.expected
            if not any(
                each.covers(name) and each.outcome in series.failures
                for name, series in self.now.items()
            )
        ]
