"""The result of ``weighin check`` in a terminal, Markdown, GitHub's annotations, JUnit XML and JSON."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from xml.etree import ElementTree as ET

from weighin.gate.check import FAILING, WITHIN_BUDGET, GateResult, Line, LineVerdict
from weighin.records.metrics import grouped
from weighin.records.series import FORMAT, STRATEGY
from weighin.show.table import Column, Document, Entry, Lines, Table, escaped, markdown
from weighin.text import one_line

KINDS: Final[Mapping[LineVerdict, str]] = {
    **dict.fromkeys(FAILING, "worse"),
    LineVerdict.CHANGED: "changed",
    LineVerdict.IMPROVED: "better",
    LineVerdict.NEW: "new",
    LineVerdict.EXPECTED: "same",
    LineVerdict.SAME: "same",
}
"""The kind of an entry in tables, of each verdict."""
_LEVELS: Final = {"worse": "error", "changed": "warning", "better": "notice", "new": "notice"}
"""The level of an annotation, of each kind."""


def summary(result: GateResult) -> str:
    """Return the result in one line: "gate failed: 1 regressed, 4 same"."""
    counts = Counter(line.title for line in result.lines)
    titles = [verdict.value for verdict in LineVerdict]
    titles.insert(titles.index(LineVerdict.SAME), WITHIN_BUDGET)
    words = ", ".join(f"{counts[title]} {title}" for title in titles if counts[title])
    return f"gate {'failed' if result.failed else 'passed'}: {words or 'nothing to judge'}"


def terminal(result: GateResult, *, whole: bool = False) -> Document:
    """Return the result, unless ``whole`` without unchanged figures, or with the one nearest to its limit."""
    notable = [line for line in result.lines if line.verdict is not LineVerdict.SAME]
    shown = result.lines if whole else notable or result.lines[:1]
    names, common = short_names(line.series for line in shown)
    figures = [line for line in shown if line.metric]
    plain = grouped((line for line in shown if not line.metric), lambda line: line.fails)
    failing, others = (
        [f"{one.verdict} {names[one.series]}: {one_line(one.text)}" for one in plain.get(fails, ())]
        for fails in (True, False)
    )
    worst = {line.series: line for line in reversed(result.failed) if line.phases}
    passed = 0 if whole or notable else sum(line.metric is not None for line in result.lines)
    nearest = [f"of {passed} figures that pass, the nearest to its limit"] if passed > 1 else []
    return [
        Lines("", failing),
        *([_table(figures, names)] if figures else []),
        Lines("", others),
        Lines("", nearest, "dim"),
        *(_phases(worst[name], names[name]) for name in names if name in worst),
        Lines("", [f"all: {common}"] if common else [], "dim"),
        Lines("", [f"note: {note}" for note in result.notes]),
        Lines("", [summary(result)], "failed" if result.failed else "passed"),
    ]


def write_markdown(result: GateResult, *, whole: bool = False) -> str:
    """Return the terminal's text as Markdown, with the summary first."""
    head = f"## {'❌' if result.failed else '✅'} weighin check\n\n{escaped(summary(result))}"
    parts = [head, markdown(terminal(result, whole=whole)[:-1], 3)]
    return "\n\n".join(filter(None, parts)) + "\n"


def annotations(result: GateResult, file: str | None = None) -> Iterator[str]:
    """Yield GitHub's "workflow commands", which it shows as annotations of the baseline ``file``."""

    def data(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def value(text: str) -> str:
        return data(text).replace(":", "%3A").replace(",", "%2C")

    for line in result.lines:
        if level := _LEVELS.get(KINDS[line.verdict]):
            place = f"file={value(file)}," if file else ""
            title = value(f"{line.verdict}: {line.series}")
            yield f"::{level} {place}title={title}::{data(describe(line))}"


def junit(result: GateResult) -> str:
    """Return JUnit XML (junit-10.xsd): each line is a test case, whose class is the name of the series."""
    root, failures = ET.Element("testsuites"), len(result.failed)
    about = {"name": "weighin check", "tests": str(len(result.lines)), "failures": str(failures)}
    about |= dict.fromkeys(("errors", "skipped", "time"), "0")
    suite = ET.SubElement(root, "testsuite", about)
    for line in result.lines:
        names = {"classname": one_line(line.series), "name": one_line(line.what)}
        text = describe(line)
        case = ET.SubElement(suite, "testcase", names, time="0")
        if line.fails:
            kind = line.verdict.replace(" ", "_")
            failure = ET.SubElement(case, "failure", type=kind, message=text)
            aligned = "\n".join(_aligned(_phases(line, line.series))) if line.phases else ""
            failure.text = aligned or text
        elif line.verdict is not LineVerdict.SAME:
            ET.SubElement(case, "system-out").text = f"{line.verdict}: {text}"
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def as_json(result: GateResult) -> dict[str, Any]:
    lines = [
        {
            "verdict": line.verdict,
            "failed": line.fails,
            "series": line.series,
            "metric": line.metric.name if line.metric else None,
            "unit": line.metric.unit if line.metric else None,
            "what": line.what,
            "text": line.text,
            "baseline": line.was if line.metric else None,
            "now": line.now if line.metric else None,
            "allowed": line.allowed if line.metric else None,
            "grew_in": line.grown.phase if line.grown else None,
            "phases": [
                {"phase": each.phase, "baseline": each.was, "now": each.now} for each in line.phases
            ],
        }
        for line in result.lines
    ]
    return {
        "passed": not result.failed,
        "summary": summary(result),
        "notes": list(result.notes),
        "lines": lines,
    }


def describe(line: Line) -> str:
    """Return a line as text: the metric, the earlier and the new figure, the limit, the grown phase."""
    metric = line.metric
    if metric is None:
        return one_line(line.text)
    words = f"{line.what}: {metric.text(line.was)} -> {metric.text(line.now)}, {metric.change(line.was, line.now)}"
    words += f"; limit {metric.text(line.allowed)}"
    if line.grown and line.fails:
        step = metric.change(0, line.grown.step).lstrip("+")
        words += f"; grew in phase {one_line(line.grown.phase)} by {step}"
    return words


def short_names(names: Iterable[str]) -> tuple[dict[str, str], str]:
    """Return a short name for each series, and the words left out because all names share them."""
    full = {name: name.split(" ") for name in names}
    series = [words for words in full.values() if len(words) > FORMAT]  # not "environment"
    common = set(series[0]).intersection(*series[1:]) if series else set()
    common -= {"", *(words[STRATEGY] for words in series)}
    formats = {(words[STRATEGY], words[FORMAT]) for words in series}
    # The format is left out of the names if each strategy has only one format.
    implied = {FORMAT} if len(formats) == len({strategy for strategy, _ in formats}) else set()
    short = {
        name: " ".join(
            word
            for index, word in enumerate(words)
            if len(words) <= FORMAT or (word not in common and index not in implied)
        )
        for name, words in full.items()
    }
    return short, " ".join(word for word in series[0] if word in common) if series else ""


def _phases(line: Line, name: str) -> Table:
    """Return a table of the metric of a line in each phase, in which the phase that grew is marked."""
    metric = line.metric
    assert metric is not None
    figure = metric.name if metric.name == "above_import" else metric.in_phase
    rows: list[list[Entry | str]] = []
    for each in line.phases:
        was = "-" if each.was is None else metric.text(each.was)
        change = "new" if each.was is None else metric.change(each.was, each.now)
        grew = "grew" if each == line.grown else ""
        rows.append([one_line(each.phase), was, metric.text(each.now), Entry(change, grew)])
    heads = (f"{figure.replace('_', ' ')} in phase", "before", "now", "change")
    columns = [Column(head, is_name=at == 0) for at, head in enumerate(heads)]
    return Table(f"{name}, {line.what}, by phase", columns, rows)


def _aligned(phases: Table) -> Iterator[str]:
    """Yield the lines of a table of phases as plain text, with an arrow at the phase that grew."""
    rows = [[Entry(column.title) for column in phases.columns], *phases.entries]
    widths = [max(len(entry.text) for entry in column) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        text = name.text.ljust(widths[0])
        for figure, width in zip(figures, widths[1:], strict=True):
            text += f"  {figure.text:>{width}}"
        grew = figures[-1].spread
        yield f"{text}  <- {grew}" if grew else text


def _table(lines: Sequence[Line], names: Mapping[str, str]) -> Table:
    """Return a table of lines that have figures; the bound of a budget is in the column "limit"."""
    rows: list[list[Entry | str]] = []
    for line in lines:
        metric = line.metric
        assert metric is not None
        change, _, share = metric.change(line.was, line.now).partition(" (")
        grown = line.grown if line.fails else None
        rows.append([
            Entry(line.title, kind=KINDS[line.verdict]),
            names[line.series],
            line.what,
            "" if line.is_budget else metric.text(line.was),
            metric.text(line.now),
            Entry(change, share.rstrip(")")),
            metric.text(line.allowed),
            f"{one_line(grown.phase)} {metric.change(0, grown.step)}" if grown else "",
        ])  # fmt: skip
    columns = [
        *(Column(one, is_name=True) for one in ("verdict", "series", "what")),
        Column("before", rank=1),
        *(Column(one) for one in ("now", "change", "limit")),
        Column("grew in", is_name=True, rank=2),
    ]
    return Table("", columns, rows)
