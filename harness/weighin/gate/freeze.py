"""What was measured becomes the baseline: the file's lower half, and what its owner agreed to expect."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Final

import yaml

from weighin import __version__
from weighin.atomic import write_text
from weighin.errors import ConfigError
from weighin.gate.baseline import Rules, default_rules, read
from weighin.gate.expected import Expectation
from weighin.records.machine import Setting, policy_of
from weighin.records.metrics import METRICS
from weighin.records.series import Series

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

# Outcomes that are not ok, and are meant to be so:  baseline: oom_killed   "mmap_assign ram=1GiB": timeout
expect: {}

# What another torch, kernel, ... means:  kernel: ignore   cpu: fail   "settings.*": warn
environment: {}

"""


def update(
    path: Path,
    environment: Mapping[str, Setting],
    series: Mapping[str, Series],
    expect: Sequence[Expectation] = (),
) -> list[str]:
    """Write what was measured into a baseline file, keeping what its owner wrote.

    ``expect`` is what is to be expected beside what the file expects already. Returns the lines of
    the difference, none where nothing changed.

    Raises:
        ConfigError: the file cannot be used or written.
    """
    rules = read(path).rules if path.exists() else default_rules()
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    head = with_expectations(_head_of(old) if old else _HEAD, expect)
    head += "" if head.endswith("\n") else "\n"
    new = head + "\n".join(_lines(rules, environment, series)) + "\n"
    if new != old:
        _write(path, new)
    names = (str(path), str(path))
    return list(unified_diff(old.splitlines(), new.splitlines(), *names, n=1, lineterm=""))


def with_expectations(head: str, wanted: Sequence[Expectation]) -> str:
    """Return the owner's part of a file with more in its ``expect``; all else stays as it is.

    Raises:
        ConfigError: it is written in a way that cannot be added to.
    """
    known = yaml.safe_load(head) or {}
    merged = dict(known.get("expect") or {})
    new = {
        one.selector: one.outcome.value for one in wanted if merged.get(one.selector) != one.outcome
    }
    changed = head
    try:
        for selector, outcome in new.items():
            changed = _with_line(changed, selector, outcome)
        is_right = not new or yaml.safe_load(changed) == known | {"expect": merged | new}
    except yaml.YAMLError:
        is_right = False
    if not is_right:
        shown = ", ".join(f"{_text(selector)}: {outcome}" for selector, outcome in new.items())
        raise ConfigError(
            "the baseline's expect cannot be added to as it is written", f"write into it: {shown}"
        )
    return changed


def _with_line(head: str, selector: str, outcome: str) -> str:
    """Return the text with one key of ``expect`` set, in the style that is there."""
    line = f"{_text(selector)}: {outcome}"
    root = yaml.compose(head, yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    node = next((value for key, value in pairs if key.value == "expect"), None)
    if node is None:
        gap = "" if not head or head.endswith("\n") else "\n"
        return f"{head}{gap}expect:\n  {line}\n"
    start, end = node.start_mark.index, node.end_mark.index
    inner = node.value if isinstance(node, yaml.MappingNode) else []
    for key, value in inner:
        if key.value == selector:
            return head[: value.start_mark.index] + outcome + head[value.end_mark.index :]
    if not inner:  # {} or nothing
        return f"{head[:start].rstrip(' ')}\n  {line}{head[end:]}"
    if node.flow_style:
        return f"{head[: end - 1].rstrip()}, {line}{head[end - 1 :]}"
    last = head.find("\n", inner[-1][1].end_mark.index)
    before = head[: last + 1] if last >= 0 else f"{head}\n"
    indent = " " * inner[0][0].start_mark.column
    return f"{before}{indent}{line}\n{head[len(before) :]}"


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", "name a file that you may write"
        ) from None
