"""Read and write the baseline file: the accepted figures and outcomes of a run.

``weighin check --update`` writes it as JSON with one figure on a line, so that ``git diff`` shows which
one changed. A file of an earlier weighin is YAML, in which the user wrote rules; it is read, and the
next update writes it as JSON, with the same rules.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, StrictInt

from weighin.errors import ConfigError, HarnessError
from weighin.files import object_in, write_text
from weighin.gate.rules import Rules, changed, expectation, parse_budget
from weighin.records import run_folder
from weighin.records.machine import Policy, Setting, policy_of
from weighin.records.metrics import METRICS, Direction, Tolerance, named
from weighin.records.series import Figure, Series
from weighin.settings.definition import Strict, in_file, validate
from weighin.settings.yaml_file import read_mapping

SCHEMA: Final = 1

# YAML reads a key without a value as null, and the word off as false.
_Map = BeforeValidator(lambda value: {} if value is None else value)
_List = BeforeValidator(lambda value: [] if value is None else value)
_Off = BeforeValidator(lambda value: None if value in (False, "off") else value)


class _Tolerance(Strict):
    relative: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    absolute: str | int | None = None
    direction: Direction | None = None


# A single number is the range of equal repeats.
_Range = Annotated[
    list[StrictInt],
    Field(min_length=3, max_length=3),
    BeforeValidator(lambda value: value if isinstance(value, list) else [value] * 3),
]


class _Series(Strict):
    outcome: str
    repeats: Annotated[int, Field(ge=1)]
    model_bytes: StrictInt | None = None
    figures: Annotated[dict[str, _Range], _Map] = Field(default_factory=dict)
    phases: Annotated[dict[str, dict[str, StrictInt]], _Map] = Field(default_factory=dict)


class _Measured(Strict):
    environment: Annotated[dict[str, Setting], _Map] = Field(default_factory=dict)
    expect: Annotated[dict[str, str], _Map] = Field(default_factory=dict)
    series: Annotated[dict[str, _Series], _Map] = Field(default_factory=dict)


class _File(Strict):
    schema_: Annotated[int, Field(alias="schema", ge=1)]
    metrics: Annotated[dict[str, Annotated[_Tolerance | None, _Off]], _Map] = Field(default_factory=dict)  # fmt: skip
    budgets: Annotated[list[str], _List] = Field(default_factory=list)
    expect: Annotated[dict[str, str], _Map] = Field(default_factory=dict)
    environment: Annotated[dict[str, Policy], _Map] = Field(default_factory=dict)
    measured: _Measured = _Measured()


@dataclass(frozen=True, slots=True)
class Baseline:
    """The content of a baseline file; ``series`` has the figures, by the name of the series."""

    rules: Rules
    environment: Mapping[str, Setting]
    series: Mapping[str, Series]


def read(path: Path) -> Baseline:
    """Read a baseline file; the error names the invalid key or line, or a newer weighin."""
    if not path.exists():
        raise ConfigError(
            f"the baseline file {path} does not exist",
            "create the baseline file from a good run: weighin check RUN --baseline"
            f" {quote(str(path))} --update",
        )
    return _parsed(path, _content(path))


def _content(path: Path) -> dict[str, Any]:
    content = object_in(path) or read_mapping(path)  # JSON is read in a hundredth of YAML's time
    run_folder.refuse_newer(content, SCHEMA, path)
    return content


def _parsed(path: Path, content: Mapping[str, Any]) -> Baseline:
    file = validate(_File, content, in_file(path))
    try:
        tolerances: dict[str, Tolerance | None] = {**Rules().tolerances}
        for name, chosen in file.metrics.items():
            metric = named(name)
            tolerances[metric.name] = changed(metric, **chosen.model_dump()) if chosen else None
        expected = (*file.expect.items(), *file.measured.expect.items())
        rules = Rules(
            {name: one for name, one in tolerances.items() if one},
            tuple(map(parse_budget, file.budgets)),
            file.environment,
            tuple(expectation(*one) for one in expected),
        )
    except HarnessError as error:
        raise ConfigError(f"{path}: {error.message}", error.repair) from None
    series = {
        name: Series(
            one.outcome,
            one.repeats,
            one.model_bytes,
            figures={key: Figure(*value) for key, value in one.figures.items()},
            phases=one.phases,
        )
        for name, one in file.measured.series.items()
    }
    return Baseline(rules, dict(file.measured.environment), series)


def write(
    path: Path,
    environment: Mapping[str, Setting],
    series: Mapping[str, Series],
    **typed: Iterable[str],
) -> list[str]:
    """Write a baseline file with what the rules in it and those ``typed`` compare; return the diff."""
    old = _content(path) if path.exists() else {}
    rules = (_parsed(path, old).rules if old else Rules()).typed(**typed)
    judged = [name for name in METRICS if name in rules.tolerances]
    new = old | {
        "schema": SCHEMA,
        "measured": {
            "environment": {
                name: value
                for name, value in sorted(environment.items())
                if policy_of(name, rules.policies) != "ignore"
            },
            "series": {name: _series(one, judged) for name, one in sorted(series.items())},
        },
    }
    if old and _parsed(path, new) == _parsed(path, old):
        return []
    with run_folder.writing(path, repair="free space, or name a file in a writable folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, _text(new))
    before = _text(old).splitlines() if old else []
    return list(unified_diff(before, _text(new).splitlines(), str(path), str(path), n=1, lineterm=""))  # fmt: skip


def _series(one: Series, judged: list[str]) -> dict[str, Any]:
    content: dict[str, Any] = {"outcome": one.outcome, "repeats": one.repeats}
    if one.model_bytes:
        content["model_bytes"] = one.model_bytes
    if not one.is_ok:
        return content  # a load that was cut off may need more memory than its peak
    known = {name: one.figures[name] for name in judged if name in one.figures}
    content["figures"] = {
        name: each.median if each.low == each.high else [each.low, each.median, each.high]
        for name, each in known.items()
    }
    always = {name for name in judged if "save" in METRICS[name].operations}
    explaining = {METRICS[name].in_phase for name in always | known.keys()}
    content["phases"] = {
        phase: {key: value for key, value in figures.items() if key in explaining}
        for phase, figures in one.phases.items()
    }
    return content


def _text(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, indent=1)
    return re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text) + "\n"
