"""Fail a test that reads the peaks of a measurement that did not end ok."""

from dataclasses import fields
from typing import Any, Final

from weighin.result import Outcome, Result

_FIGURES: Final = ("peaks", "above_import_bytes", "use_phases")


class NotOk(Result):
    """A ``Result`` of a failed measurement: to read its peaks raises AssertionError.

    The peaks of a failed load do not show how much memory the load needs. A test that expects a
    failure can read ``outcome``, ``message`` and ``phases``.
    """

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        """Return the attribute ``name``; raise AssertionError if it is in ``_FIGURES``."""
        if name in _FIGURES:
            __tracebackhide__ = True
            end = f"{self.outcome}: {self.message}" if self.message else self.outcome
            raise AssertionError(
                f"{name} cannot be read, because {self.cell.strategy} did not end ok: {end}\nthe"
                " peaks of such a load are incomplete: if the outcome is intended, assert"
                ' run.outcome == "..." and read no peaks'
            )
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        """Return a short text, which pytest prints when an assertion on the outcome fails."""
        return f"<result of {self.cell.strategy}: {self.outcome}>"


def guarded(result: Result) -> Result:
    """Return the result if its outcome is ok, else a ``NotOk``."""
    if result.outcome is Outcome.OK:
        return result
    return NotOk(**{each.name: getattr(result, each.name) for each in fields(result)})
