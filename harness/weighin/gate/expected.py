"""Outcomes that are meant to be so: ``baseline: oom_killed`` in a baseline file, or ``--expect``.

A selector is shell wildcards on words of a series' name, as in a budget; of several, divided by
spaces, each must match a word: ``baseline ram=8GiB``.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from weighin.errors import ConfigError
from weighin.exit_codes import BROKEN
from weighin.record import Outcome
from weighin.records.series import STRATEGY, Series, selects

EXPECTABLE: Final = (Outcome.OOM_KILLED, Outcome.CUDA_OOM, Outcome.TIMEOUT, Outcome.SKIPPED)
_ITEM: Final = re.compile(rf"\s*(?P<selector>.+?)\s*=\s*(?P<outcome>{'|'.join(Outcome)})\s*(?:,|$)")
_REPAIR: Final = (
    f"write it as in baseline=oom_killed; what can be expected: {', '.join(EXPECTABLE)}"
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """One outcome that is no failure in the series that a selector means; ``source`` says whose."""

    selector: str
    outcome: Outcome
    source: str = "expect"

    def __str__(self) -> str:
        """The expectation as ``parse`` reads it."""
        return f"{self.selector}={self.outcome}"

    def covers(self, name: str) -> bool:
        """Tell whether a series of this name is meant."""
        return selects(self.selector, name)


def of_file(selector: str, outcome: str) -> Expectation:
    """Return one line of a baseline file's ``expect``.

    Raises:
        ConfigError: what fails every gate, or is no outcome, cannot be expected.
    """
    return _checked(Expectation(selector, _outcome(outcome)), f"expect: {selector}: {outcome}")


def parse(text: str) -> list[Expectation]:
    """Return what one ``--expect`` names: ``baseline=oom_killed,sequential=oom_killed``.

    Raises:
        ConfigError: it cannot be read, or cannot be expected.
    """
    found, place = [], 0
    while place < len(text):
        item = _ITEM.match(text, place)
        if item is None:
            raise ConfigError(f"cannot read --expect {text[place:]!r}", _REPAIR)
        one = Expectation(item["selector"], Outcome(item["outcome"]), "--expect")
        found.append(_checked(one, f"--expect {one}"))
        place = item.end()
    if not found:
        raise ConfigError(f"cannot read --expect {text!r}", _REPAIR)
    return found


def is_expected(name: str, series: Series, expected: Iterable[Expectation]) -> bool:
    """Tell whether all outcomes of a series that are not ok are meant to be so."""
    allowed = {one.outcome.value for one in expected if one.covers(name)}
    return series.failures <= allowed and not series.failures & {*BROKEN}


def suggest(names: Iterable[str], series: Mapping[str, Series]) -> list[Expectation]:
    """Return what would have to be expected for some series that failed in one way; the shortest.

    Each selector means series of that outcome alone: a strategy, where need be its limit, else the
    whole name. What nobody may expect is left out.
    """
    found: dict[str, Expectation] = {}
    for name in names:
        ends = series[name].failures
        if len(ends) != 1 or not ends <= {*EXPECTABLE}:
            continue
        (end,) = ends
        for selector in _selectors(name):
            one = Expectation(selector, Outcome(end))
            if all(series[other].failures == ends for other in series if one.covers(other)):
                found.setdefault(selector, one)
                break
    return list(found.values())


def _selectors(name: str) -> list[str]:
    words = name.split(" ")
    strategy = words[min(STRATEGY, len(words) - 1)]
    limits = [word for word in words if word.startswith(("ram=", "vram="))]
    return [strategy, *([" ".join([strategy, *limits])] if limits else []), name]


def _outcome(text: str) -> Outcome:
    if text not in {*Outcome}:
        raise ConfigError(f"expect: {text!r} is no outcome", _REPAIR)
    return Outcome(text)


def _checked(one: Expectation, shown: str) -> Expectation:
    if one.outcome not in EXPECTABLE:
        why = "a strategy that is wrong fails every gate" if one.outcome in BROKEN else "it says nothing"  # fmt: skip
        raise ConfigError(f"{shown}: {one.outcome} cannot be expected: {why}", _REPAIR)
    return one
