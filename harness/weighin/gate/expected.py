"""Parse the outcomes other than ok that a user expects, such as ``--expect streaming=oom_killed``.

The selector, before the "=", has one or more words, which may have shell wildcards. It matches a
measurement if each of its words matches a word of the measurement's name.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from weighin.errors import ConfigError
from weighin.records.series import STRATEGY, Series, selects
from weighin.result import BROKEN, Outcome

EXPECTABLE: Final = (
    Outcome.OOM_KILLED,
    Outcome.CHILD_KILLED,
    Outcome.CUDA_OOM,
    Outcome.TIMEOUT,
    Outcome.THRASHING,
    Outcome.SKIPPED,
)
_ITEM: Final = re.compile(rf"\s*(?P<selector>.+?)\s*=\s*(?P<outcome>{'|'.join(Outcome)})\s*(?:,|$)")
_REPAIR: Final = (
    "write an expected outcome as in baseline=oom_killed; outcomes that can be expected:"
    f" {', '.join(EXPECTABLE)}"
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """An outcome other than ok that passes; ``source`` is the option or file key that named it."""

    selector: str
    outcome: Outcome
    source: str = "expect"

    def __str__(self) -> str:
        """The expected outcome as a text that ``parse`` can read: "streaming=oom_killed"."""
        return f"{self.selector}={self.outcome}"

    def covers(self, name: str) -> bool:
        """Return whether the selector matches the measurement with this name."""
        return selects(self.selector, name)


def of_file(selector: str, outcome: str) -> Expectation:
    """Return the expected outcome of a line ``selector: outcome`` under ``expect`` in a baseline file.

    Raises:
        ConfigError: the outcome does not exist or cannot be expected.
    """
    return _checked(Expectation(selector, _outcome(outcome)), f"expect: {selector}: {outcome}")


def parse(text: str) -> list[Expectation]:
    """Parse the value of ``--expect``, such as ``streaming=oom_killed,sequential=timeout``.

    Raises:
        ConfigError: the text cannot be parsed, or an outcome cannot be expected.
    """
    expectations, place = [], 0
    while place < len(text):
        item = _ITEM.match(text, place)
        if item is None:
            raise ConfigError(f"cannot read --expect {text[place:]!r}", _REPAIR)
        expectation = Expectation(item["selector"], Outcome(item["outcome"]), "--expect")
        expectations.append(_checked(expectation, f"--expect {expectation}"))
        place = item.end()
    if not expectations:
        raise ConfigError(f"cannot read --expect {text!r}", _REPAIR)
    return expectations


def is_expected(name: str, series: Series, expected: Iterable[Expectation]) -> bool:
    """Return whether every repeat of the measurement ``name`` ended ok or with an expected outcome."""
    allowed = {each.outcome.value for each in expected if each.covers(name)}
    return series.failures <= allowed and not series.failures & {*BROKEN}


def suggest(names: Iterable[str], series: Mapping[str, Series]) -> list[Expectation]:
    """Return expected outcomes, with short selectors, for the failed measurements ``names``.

    A selector is the strategy's name. If other measurements of the strategy ended otherwise, the
    selector also has the memory limit, or is the measurement's whole name. A measurement is left
    out if its repeats failed in different ways, or if its outcome cannot be expected.
    """
    suggested: dict[str, Expectation] = {}
    for name in names:
        ends = series[name].failures
        if len(ends) != 1 or not ends <= {*EXPECTABLE}:
            continue
        (end,) = ends
        for selector in _selectors(name):
            expectation = Expectation(selector, Outcome(end))
            if all(series[other].failures == ends for other in series if expectation.covers(other)):
                suggested.setdefault(selector, expectation)
                break
    return list(suggested.values())


def _selectors(name: str) -> list[str]:
    words = name.split(" ")
    strategy = words[min(STRATEGY, len(words) - 1)]
    limits = [word for word in words if word.startswith(("ram=", "vram="))]
    return [strategy, *([" ".join([strategy, *limits])] if limits else []), name]


def _outcome(text: str) -> Outcome:
    if text not in {*Outcome}:
        raise ConfigError(f"expect: {text!r} is not one of the outcomes", _REPAIR)
    return Outcome(text)


def _checked(expectation: Expectation, shown: str) -> Expectation:
    outcome = expectation.outcome
    if outcome not in EXPECTABLE:
        why = (
            "a failed strategy always fails a check"
            if outcome in BROKEN
            else "this outcome says nothing about the strategy"
        )
        raise ConfigError(f"{shown}: {outcome} cannot be an expected outcome: {why}", _REPAIR)
    return expectation
