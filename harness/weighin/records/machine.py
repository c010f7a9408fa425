"""Where a run was measured, and what it means for a gate that this differs from the baseline's.

Figures of another torch or another cgroup version are other figures: such a difference fails. A
newer kernel or another processor changes little in memory: it is said, and times are not judged.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from weighin.units import GIB

Policy = Literal["ignore", "warn", "fail"]
Setting = str | int | float | bool | None

# The first pattern that matches a setting counts; what matches none is warned of.
_POLICIES: Final[tuple[tuple[str, Policy], ...]] = (
    ("isolation.image", "ignore"),  # a hash of the wheels: their versions are settings themselves
    ("isolation.groups", "ignore"),
    ("git_*", "ignore"),  # what is measured may change: that is the question
    ("psi", "ignore"),
    ("governor", "ignore"),
    ("swap_bytes", "ignore"),  # a cell has none
    ("torch", "fail"),
    ("cuda", "fail"),
    ("gpu", "fail"),
    ("machine", "fail"),
    ("cgroup_version", "fail"),
    ("thp", "fail"),
    ("page_bytes", "fail"),
    ("settings.*", "fail"),
)
TIMING: Final = ("machine", "cpu", "cpus", "threads", "gpu", "kernel", "torch", "settings.*")
"""Where one of these differs, times are not compared."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that is not the baseline's. A value of None: it was not there."""

    name: str
    was: Setting
    now: Setting
    policy: Policy

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.was)} -> {_shown(self.now)}"


def settings_of(environments: Iterable[Mapping[str, Any]]) -> dict[str, Setting]:
    """Return all settings, flat and sorted; one that changed within the run is "a | b"."""
    seen: dict[str, dict[str, Setting]] = {}
    for environment in environments:
        for name, value in _flat(environment):
            seen.setdefault(name, {})[_shown(value)] = value
    return {
        name: " | ".join(sorted(values)) if len(values) > 1 else next(iter(values.values()))
        for name, values in sorted(seen.items())
    }


def policy_of(name: str, chosen: Mapping[str, Policy]) -> Policy:
    """Return what a difference in this setting means; ``chosen`` goes before the defaults."""
    for pattern, policy in (*chosen.items(), *_POLICIES):
        if fnmatchcase(name, pattern):
            return policy
    return "warn"


def differences(
    was: Mapping[str, Setting], now: Mapping[str, Setting], chosen: Mapping[str, Policy]
) -> list[Difference]:
    """Return what differs and is not ignored, by name."""
    found = [
        Difference(name, was.get(name), now.get(name), policy_of(name, chosen))
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name)
    ]
    return [one for one in found if one.policy != "ignore"]


def spoils_times(found: Iterable[Difference]) -> bool:
    """Tell whether times measured under these differences say nothing about the code."""
    return any(fnmatchcase(one.name, pattern) for one in found for pattern in TIMING)


def _flat(environment: Mapping[str, Any]) -> Iterable[tuple[str, Setting]]:
    for name, value in environment.items():
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield f"{name}.{key}", _plain(inner)
        elif name == "ram_bytes":
            # Two boots of one machine differ by some pages.
            yield "ram_gib", round(value / GIB)
        else:
            yield name, _plain(value)


def _plain(value: Any) -> Setting:
    return value if isinstance(value, str | int | float | bool | None) else json.dumps(value)


def _shown(value: Setting) -> str:
    return "not set" if value is None else str(value)
