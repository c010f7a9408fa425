"""Write measured figures and accepted outcomes into a baseline file."""

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
# Compare a run with this baseline:  weighin check RUN --baseline THIS_FILE
# Edit the part above the line "# measured"; docs/ci.md describes its keys.
schema: 1

# Tolerances other than the defaults:  ready: {relative: 0.3, absolute: 1 s}   load: off   anon: {direction: both}
metrics: {}

# Absolute bounds:  - peak_rss <= 1.1 x model   - "streaming: anon <= model + 300MiB"
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
    """Write the measured figures into a baseline file; keeps the part that the user edits.

    ``expect`` is added to the outcomes that the file expects already. Returns the lines of the
    diff, empty if nothing changed.

    Raises:
        ConfigError: the file is invalid or cannot be written.
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
    """Return the user's part of a file with additions to ``expect``; the rest is unchanged.

    Raises:
        ConfigError: ``expect`` is written in a style that cannot be extended.
    """
    content = yaml.safe_load(head) or {}
    merged = dict(content.get("expect") or {})
    new = {
        each.selector: each.outcome.value
        for each in wanted
        if merged.get(each.selector) != each.outcome
    }
    changed = head
    try:
        for selector, outcome in new.items():
            changed = _with_line(changed, selector, outcome)
        is_right = not new or yaml.safe_load(changed) == content | {"expect": merged | new}
    except yaml.YAMLError:
        is_right = False
    if not is_right:
        shown = ", ".join(f"{_text(selector)}: {outcome}" for selector, outcome in new.items())
        raise ConfigError(
            "the baseline's expect is written in a style that cannot be extended",
            f"add to it by hand: {shown}",
        )
    return changed


def _with_line(head: str, selector: str, outcome: str) -> str:
    """Return the text with one key of ``expect`` set, in the present style."""
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
    """Return the user's part of a file: all lines before ``# measured`` or ``measured:``."""
    kept = []
    for line in text.splitlines(keepends=True):
        if line.startswith((_MARK, "measured:")):
            break
        kept.append(line)
    return "".join(kept)


def _lines(
    rules: Rules, environment: Mapping[str, Setting], series: Mapping[str, Series]
) -> Iterator[str]:
    yield f"{_MARK} by weighin {__version__}; the lines below are written by: weighin check RUN --baseline FILE --update"
    yield "measured:"
    yield "  environment:"
    for name, value in sorted(environment.items()):
        if policy_of(name, rules.policies or {}) != "ignore":
            yield f"    {_text(name)}: {_text(value)}"
    yield "  series:"
    judged = [METRICS[name] for name in METRICS if name in rules.tolerances]
    explaining = {metric.in_phase for metric in judged}
    for name, entry in sorted(series.items()):
        yield f"    {_text(name)}:"
        yield f"      outcome: {_text(entry.outcome)}"
        yield f"      repeats: {entry.repeats}"
        if entry.model_bytes:
            yield f"      model_bytes: {entry.model_bytes}"
        if not entry.is_ok:
            continue  # the peak of a cell that was cut off is not its need
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
        yield "      phases:"
        for phase, figures in entry.phases.items():
            pairs = ", ".join(
                f"{key}: {value}" for key, value in figures.items() if key in explaining
            )
            yield f"        {_text(phase)}: {{{pairs}}}"


def _text(value: Setting) -> str:
    """Return a scalar as YAML; strings are quoted unless they are plain names."""
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
