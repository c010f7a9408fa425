"""Write the measured figures, and the outcomes that the user accepted, into a baseline file."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Final

import yaml

from weighin import __version__
from weighin.errors import ConfigError
from weighin.files import write_text
from weighin.gate.baseline import Baseline, Rules, default_rules, read
from weighin.gate.expected import Expectation
from weighin.records.machine import Setting, policy_of
from weighin.records.metrics import METRICS
from weighin.records.series import Series

_MARK: Final = "# measured"
_RESERVED: Final = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
_HEAD: Final = """\
# Compare a run with this baseline:  weighin check RUN --baseline THIS_FILE
# Edit the part above the line "# measured"; docs/ci.md describes its keys.
schema: 1

# Tolerances other than the defaults:  ready: {relative: 0.3, absolute: 1 s}   load: off   anon: {direction: both}
metrics: {}

# Absolute bounds:  - peak_rss <= 1.1 x model + 64MiB above import   - "streaming: anon <= model + 300MiB"
budgets: []

# Expected outcomes other than ok:  baseline: oom_killed   "mmap_assign ram=1GiB": timeout
expect: {}

# The effect of a different torch, kernel, ...:  kernel: ignore   cpu: fail   "settings.*": warn
environment: {}

"""


def update(
    path: Path,
    environment: Mapping[str, Setting],
    series: Mapping[str, Series],
    expect: Sequence[Expectation] = (),
) -> list[str]:
    """Write the measured figures into a baseline file, and return the lines of the diff.

    The lines above ``# measured``, which the user edits, stay as they are. Below that line,
    ``update`` also writes ``expect``, and earlier ones that match a failed measurement.

    Raises:
        ConfigError: the file is invalid or cannot be written.
    """
    baseline = read(path) if path.exists() else None
    rules = baseline.rules if baseline else default_rules()
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    head = _head_of(old) if old else _HEAD
    head += "" if head.endswith("\n") else "\n"
    accepted = _accepted(baseline, series, expect)
    new = head + "\n".join(_lines(rules, environment, series, accepted)) + "\n"
    if new != old:
        _write(path, new)
    names = (str(path), str(path))
    return list(unified_diff(old.splitlines(), new.splitlines(), *names, n=1, lineterm=""))


def _accepted(
    baseline: Baseline | None, series: Mapping[str, Series], wanted: Sequence[Expectation]
) -> dict[str, str]:
    """Return the expected outcomes to write, by selector: ``wanted``, and earlier written ones.

    Earlier ones that match no failed measurement are left out, as are all that the user wrote.
    """
    failed = [name for name, entry in series.items() if not entry.is_ok]
    before = baseline.accepted if baseline else ()
    needed = [each for each in before if any(each.covers(name) for name in failed)]
    written = {str(each) for each in baseline.rules.expected} if baseline else set()
    own = written - {str(each) for each in before}
    return {
        each.selector: each.outcome.value for each in (*needed, *wanted) if str(each) not in own
    }


def _head_of(text: str) -> str:
    """Return the lines that the user edits: all lines before ``# measured`` or ``measured:``."""
    kept = []
    for line in text.splitlines(keepends=True):
        if line.startswith((_MARK, "measured:")):
            break
        kept.append(line)
    return "".join(kept)


def _lines(
    rules: Rules,
    environment: Mapping[str, Setting],
    series: Mapping[str, Series],
    accepted: Mapping[str, str],
) -> Iterator[str]:
    yield f"{_MARK} by weighin {__version__}; the lines below are written by: weighin check RUN --baseline FILE --update"
    yield "measured:"
    yield "  environment:"
    for name, value in sorted(environment.items()):
        if policy_of(name, rules.policies) != "ignore":
            yield f"    {_text(name)}: {_text(value)}"
    if accepted:
        yield "  expect:"
        yield from (f"    {_text(name)}: {accepted[name]}" for name in sorted(accepted))
    yield "  series:"
    judged = [METRICS[name] for name in METRICS if name in rules.tolerances]
    for name, entry in sorted(series.items()):
        yield f"    {_text(name)}:"
        yield f"      outcome: {_text(entry.outcome)}"
        yield f"      repeats: {entry.repeats}"
        if entry.model_bytes:
            yield f"      model_bytes: {entry.model_bytes}"
        if not entry.is_ok:
            continue  # a load that was cut off may need more memory than its peak
        yield "      figures:"
        for metric in judged:
            if figure := entry.figures.get(metric.name):
                same = figure.low == figure.high
                value = (
                    str(figure.median)
                    if same
                    else f"[{figure.low}, {figure.median}, {figure.high}]"
                )
                yield f"        {metric.name}: {value}  # {metric.text(figure.median)}"
        explaining = {
            metric.in_phase
            for metric in judged
            if "save" in metric.operations or metric.name in entry.figures
        }
        yield "      phases:"
        for phase, figures in entry.phases.items():
            pairs = ", ".join(
                f"{key}: {value}" for key, value in figures.items() if key in explaining
            )
            yield f"        {_text(phase)}: {{{pairs}}}"


def _text(value: Setting) -> str:
    """Return a value as YAML; quote a string unless it has only letters and _ and YAML reads it as text."""
    if not isinstance(value, str):
        return json.dumps(value)
    if value.replace("_", "a").isalpha() and value.isascii() and value.lower() not in _RESERVED:
        return value
    quoted: str = yaml.dump(value, default_style='"', allow_unicode=True, width=sys.maxsize)
    return quoted.rstrip("\n")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}",
            "name a file in a writable folder",
        ) from None
