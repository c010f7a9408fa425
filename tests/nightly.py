"""Which cases of a grid only a nightly run tries (``make test-nightly``).

By day each behaviour is tried once. What runs at night is the same behaviour with other values.
"""

from typing import Any

import pytest
from _pytest.mark import ParameterSet


def isolations(*by_day: str) -> list[ParameterSet]:
    """Return every isolation, for what does not depend on it: those of ``by_day``, and the rest at night."""
    marks = {"process": [], "cgroup": [pytest.mark.cgroup], "docker": [pytest.mark.docker]}
    return [
        pytest.param(name, marks=needed if name in by_day else [*needed, pytest.mark.nightly])
        for name, needed in marks.items()
    ]


def nightly(*values: Any) -> list[ParameterSet]:
    """Return these values of one parameter as cases of a nightly run."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]
