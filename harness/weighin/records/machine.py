"""Compare a run's machine and software with those in the baseline file of ``weighin check``.

Each difference has a policy. Another version of torch or of cgroups makes measurements incomparable, so the
check fails. Another kernel or processor hardly affects memory, so the check warns, and judges no times.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Final, Literal

from weighin.units import GIB

Policy = Literal["ignore", "warn", "fail"]
Setting = str | int | float | bool | None

CONCURRENT: Final = "concurrent_cells"
"""The setting that tells how many cells ran at once, if above 1; times are then not judged."""
_FAILING: Final = (
    "torch", "cuda", "gpu", "machine", "cgroup_version", "thp", "page_bytes", "settings.*",
)  # fmt: skip
_IGNORED: Final = (
    "isolation.image", "storage.*",  # which older records have otherwise, or lack
    "isolation.groups", "node.*", "disk.*",  # names; those of series tell a disk's speed
    "git_*",  # the gate exists to judge changes of the measured code
    "psi", "governor", "swap_bytes",  # a cell gets no swap
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    was: Setting
    now: Setting
    policy: Policy

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.was)} -> {_shown(self.now)}"


def settings_of(environments: Iterable[Mapping[str, Any]]) -> dict[str, Setting]:
    """Return a run's settings by dotted name, sorted; two values of one setting become "a | b"."""
    seen: dict[str, dict[str, Setting]] = {}
    for name, value in chain.from_iterable(map(_flat, environments)):
        plain = value if isinstance(value, str | int | float | bool | None) else json.dumps(value)
        seen.setdefault(name, {})[_shown(plain)] = plain
    return {
        name: " | ".join(sorted(values)) if len(values) > 1 else next(iter(values.values()))
        for name, values in sorted(seen.items())
    }


def policy_of(name: str, chosen: Mapping[str, Policy]) -> Policy:
    """Return the policy for a setting that differs; the user's policies ``chosen`` come first."""
    rules = [
        *chosen.items(),
        *((one, "ignore") for one in _IGNORED),
        *((one, "fail") for one in _FAILING),
    ]
    return next((policy for pattern, policy in rules if fnmatchcase(name, pattern)), "warn")


def differences(
    was: Mapping[str, Setting], now: Mapping[str, Setting], chosen: Mapping[str, Policy]
) -> list[Difference]:
    return [
        Difference(name, was.get(name), now.get(name), policy)
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name) and (policy := policy_of(name, chosen)) != "ignore"
    ]


def _flat(environment: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in environment.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        elif name == "ram_bytes":
            # Rounded, because the size differs by a few pages between two boots of one machine.
            yield "ram_gib", round(value / GIB)
        else:
            yield name, value


def _shown(value: Setting) -> str:
    return "not set" if value is None else str(value)
