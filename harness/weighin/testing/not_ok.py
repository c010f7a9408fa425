"""The result of a measurement that did not end ok: to read its peaks fails the test."""

from dataclasses import fields
from typing import Any, Final

from weighin.result import Outcome, Result

_FIGURES: Final = ("peaks", "above_import_bytes", "use_phases")


class NotOk(Result):
    """A ``Result`` whose peaks are not the need of what was measured, because it did not end ok.

    ``outcome``, ``message`` and ``phases`` can be read, for tests that expect a failure.
    """

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute; raise AssertionError for the peaks."""
        if name in _FIGURES:
            __tracebackhide__ = True
            end = f"{self.outcome}: {self.message}" if self.message else self.outcome
            raise AssertionError(
                f"{name} of {self.cell.strategy}, which did not end ok: {end}\n"
                'if that is intended, assert run.outcome == "..." and read no peaks'
            )
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        """Return a short text, which pytest shows where an assertion on the outcome fails."""
        return f"<result of {self.cell.strategy}: {self.outcome}>"


def guarded(result: Result) -> Result:
    """Return the result itself if it is ok, else a result without readable peaks."""
    if result.outcome is Outcome.OK:
        return result
    return NotOk(**{each.name: getattr(result, each.name) for each in fields(result)})
