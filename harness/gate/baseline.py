"""The baseline file: what was measured, and what may change. Committed, and read in diffs.

Above the line that begins with ``# measured`` it belongs to its owner, comments and all; below,
``--update`` writes it: sorted, one figure a line.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import unified_diff
from pathlib import Path
from shlex import quote
from typing import Annotated, Final, Literal

import yaml
from pydantic import BeforeValidator, Field, StrictInt

from harness import __version__, config
from harness.errors import ConfigError, HarnessError, SchemaTooNew
from harness.gate import budgets
from harness.gate.budgets import Budget
from harness.gate.metrics import METRICS, Metric, Tolerance, named
from harness.gate.series import Figure, Series
from harness.gate.settings import Policy, Setting, policy_of

SCHEMA: Final = 1
_MARK: Final = "# measured"
_RESERVED: Final = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
_HEAD: Final = """\
# What a run must keep to:  weighin check RUN --baseline THIS_FILE
# Down to the line "# measured" this file is yours to edit; docs/ci.md says what can be written here.
schema: 1

# Where a default does not fit:  ready: {relative: 0.3, absolute: 1 s}   load: off   anon: {direction: both}
metrics: {}

# Absolute bounds:  - peak_rss <= 1.1 x model   - "streaming: anon <= model + 300MiB"
budgets: []

# What another torch, kernel, ... means:  kernel: ignore   cpu: fail   "settings.*": warn
environment: {}

"""


def _as_mapping(value: object) -> object:
    return {} if value is None else value  # a key with nothing behind it


def _as_list(value: object) -> object:
    return [] if value is None else value


_Map = BeforeValidator(_as_mapping)


def _as_choice(value: object) -> object:
    return None if value in (False, "off") else value  # YAML reads a bare off as false


class _Tolerance(config.Strict):
    relative: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    absolute: str | int | None = None
    direction: Literal["lower", "higher", "both"] | None = None


_Choice = Annotated[_Tolerance | None, BeforeValidator(_as_choice)]
_Range = Annotated[list[StrictInt], Field(min_length=3, max_length=3)]


class _Series(config.Strict):
    outcome: str
    repeats: Annotated[int, Field(ge=1)]
    model_bytes: StrictInt | None = None
    figures: Annotated[dict[str, StrictInt | _Range], _Map] = Field(default_factory=dict)
    phases: Annotated[dict[str, dict[str, StrictInt]], _Map] = Field(default_factory=dict)


class _Measured(config.Strict):
    environment: Annotated[dict[str, str | int | float | bool | None], _Map] = Field(
        default_factory=dict
    )
    series: Annotated[dict[str, _Series], _Map] = Field(default_factory=dict)


class _File(config.Strict):
    schema_: Annotated[int, Field(alias="schema", ge=1)]
    metrics: Annotated[dict[str, _Choice], _Map] = Field(default_factory=dict)
    budgets: Annotated[list[str], BeforeValidator(_as_list)] = Field(default_factory=list)
    environment: Annotated[dict[str, Policy], _Map] = Field(default_factory=dict)
    measured: _Measured = _Measured()


@dataclass(frozen=True, slots=True)
class Rules:
    """What may change. ``tolerances`` has only the metrics that are judged."""

    tolerances: dict[str, Tolerance]
    budgets: tuple[Budget, ...] = ()
    policies: dict[str, Policy] | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """A baseline file: its rules, and the series that were measured, by name."""

    rules: Rules
    environment: dict[str, Setting]
    series: dict[str, Series]


def default_rules() -> Rules:
    """Return what holds where no baseline says otherwise."""
    return Rules({name: metric.tolerance for name, metric in METRICS.items()})


def read(path: Path) -> Baseline:
    """Read a baseline file.

    Raises:
        ConfigError: it is not there or cannot be used; names the key.
        SchemaTooNew: a later version wrote it.
    """
    if not path.exists():
        raise ConfigError(
            f"there is no baseline {path}",
            f"write it from a run that is as it should be: weighin check RUN --baseline {quote(str(path))} --update",
        )
    content = config.read_mapping(path)
    schema = content.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise SchemaTooNew(
            f"{path}: written by a later weighin (schema {schema}; this one knows {SCHEMA})",
            "pip install --upgrade weighin",
        )
    file = config.validate(_File, content, str(path))
    try:
        rules = _rules(file)
    except HarnessError as error:
        raise ConfigError(f"{path}: {error.message}", error.repair) from None
    series = {name: _as_series(one) for name, one in file.measured.series.items()}
    return Baseline(rules, dict(file.measured.environment), series)


def update(
    path: Path, environment: Mapping[str, Setting], series: Mapping[str, Series]
) -> list[str]:
    """Write what was measured into a baseline file, keeping what its owner wrote.

    Returns the lines of the difference, none where nothing changed.

    Raises:
        ConfigError: the file cannot be used or written.
    """
    rules = read(path).rules if path.exists() else default_rules()
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    head = _head_of(old) if old else _HEAD
    new = head + "\n".join(_lines(rules, environment, series)) + "\n"
    if new != old:
        _write(path, new)
    names = (str(path), str(path))
    return list(unified_diff(old.splitlines(), new.splitlines(), *names, n=1, lineterm=""))


def _rules(file: _File) -> Rules:
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
    )


def _tolerance(metric: Metric, chosen: _Tolerance) -> Tolerance:
    """Return the default with what is chosen in place of it; a share alone stands alone."""
    result = metric.tolerance
    if chosen.relative is not None or chosen.absolute is not None:
        absolute = chosen.absolute or 0
        result = replace(
            result,
            relative=chosen.relative or 0.0,
            absolute=metric.parse(absolute) if isinstance(absolute, str) else absolute,
        )
    return replace(result, direction=chosen.direction) if chosen.direction else result


def _as_series(one: _Series) -> Series:
    figures = {
        name: Figure(*value) if isinstance(value, list) else Figure(value, value, value)
        for name, value in one.figures.items()
    }
    return Series(
        one.outcome, one.repeats, one.model_bytes, figures=figures, phases=dict(one.phases)
    )


def _head_of(text: str) -> str:
    """Return the owner's part of a file: all before the mark, or before ``measured:`` itself."""
    kept = []
    for line in text.splitlines(keepends=True):
        if line.startswith((_MARK, "measured:")):
            break
        kept.append(line)
    return "".join(kept)


def _lines(
    rules: Rules, environment: Mapping[str, Setting], series: Mapping[str, Series]
) -> Iterator[str]:
    yield f"{_MARK} by weighin {__version__}; from here on written by: weighin check RUN --baseline FILE --update"
    yield "measured:"
    yield "  environment:"
    for name, value in sorted(environment.items()):
        if policy_of(name, rules.policies or {}) != "ignore":
            yield f"    {_text(name)}: {_text(value)}"
    yield "  series:"
    judged = [METRICS[name] for name in METRICS if name in rules.tolerances]
    explaining = {metric.in_phase for metric in judged}
    for name, one in sorted(series.items()):
        yield f"    {_text(name)}:"
        yield f"      outcome: {_text(one.outcome)}"
        yield f"      repeats: {one.repeats}"
        if one.model_bytes:
            yield f"      model_bytes: {one.model_bytes}"
        if not one.is_ok:
            continue  # a peak that was cut off says nothing of need
        yield "      figures:"
        for metric in judged:
            if figure := one.figures.get(metric.name):
                same = figure.low == figure.high
                value = (
                    str(figure.median)
                    if same
                    else f"[{figure.low}, {figure.median}, {figure.high}]"
                )
                yield f"        {metric.name}: {value}  # {metric.text(figure.median)}"
        yield "      phases:"
        for phase, figures in one.phases.items():
            known = ", ".join(
                f"{key}: {value}" for key, value in figures.items() if key in explaining
            )
            yield f"        {_text(phase)}: {{{known}}}"


def _text(value: Setting) -> str:
    """Return a scalar as YAML: strings in quotes, but for plain names."""
    if not isinstance(value, str):
        return json.dumps(value)
    if value.replace("_", "a").isalpha() and value.isascii() and value.lower() not in _RESERVED:
        return value
    quoted: str = yaml.dump(value, default_style='"', allow_unicode=True, width=sys.maxsize)
    return quoted.rstrip("\n")


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", "name a file that you may write"
        ) from None
