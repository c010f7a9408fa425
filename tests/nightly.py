"""Which cases of a grid only a nightly run tries (``make test-nightly``).

By day each behaviour is tried once, except where that takes minutes (``tests/README.md``). What else runs
at night is the same behaviour with other values.
"""

from collections.abc import Container, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def isolations(*by_day: str) -> list[ParameterSet]:
    """Return every isolation, for what does not depend on it: those of ``by_day``, and the rest at night."""
    marks = {"process": [], "cgroup": [pytest.mark.cgroup], "docker": [pytest.mark.docker]}
    return _marked(marks, by_day)


def limits(*by_day: str) -> list[ParameterSet]:
    """Return the same of every isolation that can hold a limit."""
    return _marked({"cgroup": [pytest.mark.cgroup], "docker": [pytest.mark.docker]}, by_day)


def _marked(
    marks: dict[str, list[pytest.MarkDecorator]], by_day: Container[str]
) -> list[ParameterSet]:
    return [
        pytest.param(name, marks=needed if name in by_day else [*needed, pytest.mark.nightly])
        for name, needed in marks.items()
    ]


def by_day(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return all values of one parameter: those ``chosen`` by day, and the rest at night."""
    return [value if value in chosen else nightly(value)[0] for value in values]


def nightly(*values: Any) -> list[ParameterSet]:
    """Return these values of one parameter as cases of a nightly run."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]
