"""Read the baseline file: accepted figures, and the rules by which a run is compared with them.

The user edits the lines above the line that begins with ``# measured``. ``weighin check --update``
writes the other lines (``weighin.gate.freeze``). The measurements are sorted, and each metric and
each phase has a line of its own, so that ``git diff`` shows which one changed.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, StrictInt

from weighin import install
from weighin.errors import ConfigError, HarnessError, RecordError
from weighin.gate import budgets, expected
from weighin.gate.budgets import Budget
from weighin.gate.expected import Expectation
from weighin.records.machine import Policy, Setting
from weighin.records.metrics import METRICS, Metric, Tolerance, named
from weighin.records.series import Figure, Series
from weighin.settings.definition import Strict, validate
from weighin.settings.yaml_file import read_mapping

SCHEMA: Final = 1


# YAML reads a key without a value as null, and the word off as false.
_Map = BeforeValidator(lambda value: {} if value is None else value)
_List = BeforeValidator(lambda value: [] if value is None else value)
_Off = BeforeValidator(lambda value: None if value in (False, "off") else value)


class _Tolerance(Strict):
    relative: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    absolute: str | int | None = None
    direction: Literal["lower", "higher", "both"] | None = None


_Choice = Annotated[_Tolerance | None, _Off]
_Range = Annotated[list[StrictInt], Field(min_length=3, max_length=3)]


class _Series(Strict):
    outcome: str
    repeats: Annotated[int, Field(ge=1)]
    model_bytes: StrictInt | None = None
    figures: Annotated[dict[str, StrictInt | _Range], _Map] = Field(default_factory=dict)
    phases: Annotated[dict[str, dict[str, StrictInt]], _Map] = Field(default_factory=dict)


class _Measured(Strict):
    environment: Annotated[dict[str, str | int | float | bool | None], _Map] = Field(
        default_factory=dict
    )
    expect: Annotated[dict[str, str], _Map] = Field(default_factory=dict)
    series: Annotated[dict[str, _Series], _Map] = Field(default_factory=dict)


class _File(Strict):
    schema_: Annotated[int, Field(alias="schema", ge=1)]
    metrics: Annotated[dict[str, _Choice], _Map] = Field(default_factory=dict)
    budgets: Annotated[list[str], _List] = Field(default_factory=list)
    expect: Annotated[dict[str, str], _Map] = Field(default_factory=dict)
    environment: Annotated[dict[str, Policy], _Map] = Field(default_factory=dict)
    measured: _Measured = _Measured()


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of ``weighin check``. A metric that ``tolerances`` lacks is not compared."""

    tolerances: dict[str, Tolerance]
    budgets: tuple[Budget, ...] = ()
    policies: dict[str, Policy] = field(default_factory=dict)
    expected: tuple[Expectation, ...] = ()


@dataclass(frozen=True, slots=True)
class Baseline:
    """The content of a baseline file; ``series`` has the figures, by the name of the measurement.

    ``accepted`` has the expected outcomes that ``weighin check --update`` wrote. ``rules.expected``
    also has those that the user wrote.
    """

    rules: Rules
    environment: dict[str, Setting]
    series: dict[str, Series]
    accepted: tuple[Expectation, ...] = ()


def default_rules() -> Rules:
    """Return the rules of a check without a baseline file: the default tolerance of every metric."""
    return Rules({name: metric.tolerance for name, metric in METRICS.items()})


def read(path: Path) -> Baseline:
    """Read a baseline file.

    Raises:
        ConfigError: the file cannot be read, or is invalid; the message names the invalid key or line.
        RecordError: a newer version of weighin wrote the file.
    """
    if not path.exists():
        raise ConfigError(
            f"the baseline file {path} does not exist",
            "create the baseline file from a good run: weighin check RUN --baseline"
            f" {quote(str(path))} --update",
        )
    content = read_mapping(path)
    schema = content.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise RecordError(
            f"{path}: written by a newer weighin (schema {schema}; this version reads up to {SCHEMA})",
            install.upgrade(),
        )
    file = validate(_File, content, str(path))
    try:
        accepted = _expectations(file.measured.expect)
        rules = _rules(file, accepted)
    except HarnessError as error:
        raise ConfigError(f"{path}: {error.message}", error.repair) from None
    series = {name: _as_series(entry) for name, entry in file.measured.series.items()}
    return Baseline(rules, dict(file.measured.environment), series, accepted)


def _rules(file: _File, accepted: tuple[Expectation, ...]) -> Rules:
    tolerances = dict(default_rules().tolerances)
    for name, chosen in file.metrics.items():
        metric = named(name)
        if chosen:
            tolerances[metric.name] = _tolerance(metric, chosen)
        else:
            tolerances.pop(metric.name, None)
    return Rules(
        tolerances,
        tuple(budgets.parse(text) for text in file.budgets),
        dict(file.environment),
        (*_expectations(file.expect), *accepted),
    )


def _expectations(written: dict[str, str]) -> tuple[Expectation, ...]:
    return tuple(expected.of_file(selector, outcome) for selector, outcome in written.items())


def _tolerance(metric: Metric, chosen: _Tolerance) -> Tolerance:
    """Return the metric's default tolerance, changed by the keys ``chosen`` in the baseline file.

    If the file has only one of the keys ``relative`` and ``absolute``, the other key counts as 0.
    """
    result = metric.tolerance
    if chosen.relative is not None or chosen.absolute is not None:
        absolute = chosen.absolute or 0
        result = replace(
            result,
            relative=chosen.relative or 0.0,
            absolute=metric.parse(absolute) if isinstance(absolute, str) else absolute,
        )
    return replace(result, direction=chosen.direction) if chosen.direction else result


def _as_series(entry: _Series) -> Series:
    figures = {
        name: Figure(*value) if isinstance(value, list) else Figure(value, value, value)
        for name, value in entry.figures.items()
    }
    return Series(
        entry.outcome, entry.repeats, entry.model_bytes, figures=figures, phases=dict(entry.phases)
    )
