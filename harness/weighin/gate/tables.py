"""Show the result of ``weighin check`` and of ``weighin compare`` in each form.

The forms are text for a terminal, Markdown, GitHub's annotations, JUnit XML and JSON.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree as ET

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighin.gate.check import FAILING, WITHIN_BUDGET, GateResult, Line, LineVerdict
from weighin.records.series import FORMAT, STRATEGY
from weighin.text import markdown, one_line

if TYPE_CHECKING:
    from weighin.gate.compare import Comparison

_SHOWN: Final = dict.fromkeys(FAILING, ("bold red", "❌", "error")) | {
    LineVerdict.CHANGED: ("yellow", "⚠️", "warning"),
    LineVerdict.IMPROVED: ("green", "✅", "notice"),
    LineVerdict.NEW: ("cyan", "🆕", "notice"),
    LineVerdict.EXPECTED: ("dim", "✅", ""),
    LineVerdict.SAME: ("dim", "✅", ""),
}
"""The style in a terminal, the mark in Markdown and the level of an annotation of each verdict."""
_HEADINGS: Final = ("verdict", "series", "what", "before", "now", "change", "limit", "grew in")


def summary(result: GateResult) -> str:
    """Return the result in one line: "gate failed: 1 regressed, 4 same"."""
    counts = Counter(line.title for line in result.lines)
    titles = [verdict.value for verdict in LineVerdict]
    titles.insert(titles.index(LineVerdict.SAME), WITHIN_BUDGET)
    words = [f"{counts[title]} {title}" for title in titles if counts[title]]
    return (
        f"gate {'failed' if result.failed else 'passed'}: {', '.join(words) or 'nothing to judge'}"
    )


def terminal(result: GateResult, *, whole: bool = False) -> RenderableType:
    """Return the result for a terminal of 80 columns, with several lines of text in a row.

    Without ``whole``, unchanged figures are left out. If all are unchanged, the first one is shown,
    which is the nearest to its bound.
    """
    notable = [line for line in result.lines if line.verdict is not LineVerdict.SAME]
    shown = result.lines if whole else notable or result.lines[:1]
    names, common = short_names(line.series for line in shown)
    parts: list[RenderableType] = []
    sentences = [line for line in shown if line.now is None]
    for is_table, lines in (
        (False, [line for line in sentences if line.fails]),
        (True, [line for line in shown if line.now is not None]),
        (False, [line for line in sentences if not line.fails]),
    ):
        if not is_table:
            for line in lines:
                head = Text(f"{line.verdict} ", style=_SHOWN[line.verdict][0])
                parts.append(head.append(f"{names[line.series]}: {one_line(line.text)}", "default"))
        elif lines:
            headings, rows = _cells(lines, names)
            table = Table(
                box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True
            )
            table.add_column("", overflow="fold")
            table.add_column("what", overflow="fold", min_width=12)
            for heading in headings[3:-1]:
                table.add_column(heading, justify="right", no_wrap=True)
            for line, (title, name, what, *figures, grew) in zip(lines, rows, strict=True):
                first = Text(title, _SHOWN[line.verdict][0]).append(f"\n{name}", "default")
                cells = [Text(one.replace(" (", "\n(")) for one in figures]
                cause = f"\ngrew in {one_line(line.grown.phase)}" if grew and line.grown else ""
                table.add_row(first, Text(what + cause), *cells)
            parts.append(table)
    for line in _explained(result):
        parts.append(Text(f"{names[line.series]}, {line.what}, by phase", style="bold"))
        parts += [Text(f"  {text}") for text in phase_lines(line)]
    if common:
        parts.append(Text(f"all: {common}", style="dim"))
    parts += [Text(f"note: {note}") for note in result.notes]
    parts.append(Text(summary(result), style="bold red" if result.failed else "bold green"))
    return Group(*parts)


def write_markdown(result: GateResult) -> str:
    """Return the result as Markdown, with the unchanged figures in a collapsed section."""
    names, common = short_names(line.series for line in result.lines)
    parts = [f"## {'❌' if result.failed else '✅'} weighin check\n\n{markdown(summary(result))}"]
    if notable := [line for line in result.lines if line.verdict is not LineVerdict.SAME]:
        parts.append(_markdown_table(notable, names))
    for line in _explained(result):
        head = markdown(f"{names[line.series]}, {line.what}, by phase")
        parts.append(f"**{head}**\n\n```\n" + "\n".join(phase_lines(line)) + "\n```")
    if same := [line for line in result.lines if line.verdict is LineVerdict.SAME]:
        counts = Counter("within budget" if line.is_budget else "unchanged" for line in same)
        words = ", ".join(f"{counts[title]} {title}" for title in sorted(counts, reverse=True))
        head = f"figures: {words}" if counts[WITHIN_BUDGET] else f"{len(same)} unchanged figures"
        table = _markdown_table(same, names)
        parts.append(f"<details><summary>{head}</summary>\n\n{table}\n\n</details>")
    parts += [f"- {markdown(note)}" for note in result.notes]
    if common:
        parts.append(markdown(f"All: {common}"))
    return "\n\n".join(parts) + "\n"


def annotations(result: GateResult, file: str | None = None) -> Iterator[str]:
    """Yield GitHub workflow commands, which GitHub shows as annotations of the baseline ``file``.

    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """

    def data(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def value(text: str) -> str:
        return data(text).replace(":", "%3A").replace(",", "%2C")

    for line in result.lines:
        if level := _SHOWN[line.verdict][2]:
            place = f"file={value(file)}," if file else ""
            title = value(f"{line.verdict}: {line.series}")
            yield f"::{level} {place}title={title}::{data(describe(line))}"


def junit(result: GateResult) -> str:
    """Return JUnit XML, which Jenkins, GitLab and GitHub's test reporters read (junit-10.xsd).

    Each line of the check becomes a test case, whose class is the name of the series. The text of a
    failed test case lists the series' phases, if the phases explain the metric.
    """
    suite = ET.Element(
        "testsuite",
        name="weighin check",
        tests=str(len(result.lines)),
        failures=str(len(result.failed)),
        errors="0",
        skipped="0",
        time="0",
    )
    for line in result.lines:
        case = ET.SubElement(
            suite, "testcase", classname=one_line(line.series), name=one_line(line.what), time="0"
        )
        if line.fails:
            failure = ET.SubElement(
                case, "failure", type=line.verdict.replace(" ", "_"), message=describe(line)
            )
            failure.text = "\n".join(phase_lines(line)) if line.phases else describe(line)
        elif line.verdict is not LineVerdict.SAME:
            ET.SubElement(case, "system-out").text = f"{line.verdict}: {describe(line)}"
    root = ET.Element("testsuites")
    root.append(suite)
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
            "baseline": line.was,
            "now": line.now,
            "allowed": line.allowed,
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
    if metric is None or line.was is None or line.now is None or line.allowed is None:
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


def phase_lines(line: Line) -> list[str]:
    """Return a line of text with the metric for each phase; mark the phase that caused growth."""
    metric = line.metric
    assert metric is not None
    figure = metric.name if metric.name == "above_import" else metric.in_phase
    rows = [(f"{figure.replace('_', ' ')} in phase", "before", "now", "change")]
    for each in line.phases:
        was = "-" if each.was is None else metric.text(each.was)
        change = "new" if each.was is None else metric.change(each.was, each.now)
        rows.append((one_line(each.phase), was, metric.text(each.now), change))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    grown = line.grown.phase if line.grown else None
    return [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}"
        + ("  <- grew" if index and line.phases[index - 1].phase == grown else "")
        for index, row in enumerate(rows)
    ]


def _explained(result: GateResult) -> Iterable[Line]:
    """Return the first failing line of each series with phases: the worst, as lines are sorted."""
    worst: dict[str, Line] = {}
    for line in result.failed:
        if line.phases:
            worst.setdefault(line.series, line)
    return worst.values()


def _cells(lines: Sequence[Line], names: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a table; "before" is left out for budgets alone, which lack it."""
    rows = []
    for line in lines:
        metric, grew = line.metric, ""
        head = [line.title, names[line.series]]
        if metric is None or line.was is None or line.now is None or line.allowed is None:
            rows.append([*head, one_line(line.text), "", "", "", "", ""])
            continue
        if line.grown and line.fails:
            grew = f"{one_line(line.grown.phase)} {metric.change(0, line.grown.step)}"
        before = "" if line.is_budget else metric.text(line.was)  # a bound is in the column "limit"
        figures = [before, metric.text(line.now), metric.change(line.was, line.now)]
        rows.append([*head, line.what, *figures, metric.text(line.allowed), grew])
    if not all(line.is_budget for line in lines):
        return [*_HEADINGS], rows
    headings = ["from limit" if one == "change" else one for one in _HEADINGS if one != "before"]
    return headings, [[*row[:3], *row[4:]] for row in rows]


def _markdown_table(lines: Sequence[Line], names: dict[str, str]) -> str:
    headings, rows = _cells(lines, names)
    cells = [headings, ["---:" if one in ("before", "now", "change", "from limit", "limit") else "---" for one in headings]]  # fmt: skip
    for line, (title, *row) in zip(lines, rows, strict=True):
        texts = (markdown(one_line(one)) for one in row)
        cells.append([f"{_SHOWN[line.verdict][1]} {markdown(title)}", *texts])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def compared_terminal(comparison: "Comparison") -> RenderableType:
    """Return a table for a terminal, with the difference from the first group below each figure."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("series", overflow="fold")
    table.add_column("metric", no_wrap=True)
    for letter in ascii_uppercase[: len(comparison.headings)]:
        table.add_column(letter, justify="right")
    last = None
    for row in comparison.rows:
        cells = [Text(text or "-") for text in row.texts]
        for cell, line in zip(cells[1:], row.lines, strict=True):
            if line and line.was and line.now is not None:
                share = f"\n{(line.now - line.was) / line.was * 100:+.1f} %"
                cell.append(share, style=_SHOWN[line.verdict][0])
        table.add_row(row.series if row.series != last else "", row.what, *cells)
        last = row.series
    parts: list[RenderableType] = [*map(Text, comparison.headings), table]
    if comparison.common:
        parts.append(Text(f"all: {comparison.common}", style="dim"))
    return Group(*parts, Text(comparison.summary, style="bold"))


def compared_markdown(comparison: "Comparison") -> str:
    """Return the comparison as Markdown, with changes beyond the tolerance in bold."""
    letters = [*ascii_uppercase[: len(comparison.headings)]]
    rows = [["series", "metric", *letters], ["---", "---", *("---:" for _ in letters)]]
    for row in comparison.rows:
        cells = [markdown(text or "-") for text in row.texts]
        for place, line in enumerate(row.lines, 1):
            if line and line.metric and line.was is not None and line.now is not None:
                change = markdown(line.metric.change(line.was, line.now))
                cells[place] += (
                    f" {change}" if line.verdict is LineVerdict.SAME else f" **{change}**"
                )
        rows.append([markdown(row.series), markdown(row.what), *cells])
    lines = [f"- {markdown(heading)}" for heading in comparison.headings]
    table = [f"| {' | '.join(row)} |" for row in rows]
    end = [f"All: {markdown(comparison.common)}", ""] if comparison.common else []
    return "\n".join([*lines, "", *table, "", *end, markdown(comparison.summary), ""])
