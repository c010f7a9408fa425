"""Write the result of ``weighin check`` for a terminal, and as Markdown for GitHub's step summary."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighin.gate.lines import FAILING, WITHIN_BUDGET, GateResult, Line, LineVerdict
from weighin.records.series import FORMAT, STRATEGY
from weighin.text import markdown, one_line

_HEADINGS: Final = ("", "series", "what", "before", "now", "change", "limit", "grew in")
_NUMBERS: Final = range(3, 7)
_OF_BUDGETS: Final = {"change": "from limit"}
"""Headings to replace in a table of budgets alone, because budgets have no earlier figures."""
_STYLES: Final = dict.fromkeys(FAILING, "bold red") | {
    LineVerdict.CHANGED: "yellow",
    LineVerdict.IMPROVED: "green",
    LineVerdict.NEW: "cyan",
    LineVerdict.EXPECTED: "dim",
    LineVerdict.SAME: "dim",
}
_MARKS: Final = dict.fromkeys(FAILING, "❌") | {
    LineVerdict.CHANGED: "⚠️",
    LineVerdict.IMPROVED: "✅",
    LineVerdict.NEW: "🆕",
    LineVerdict.EXPECTED: "✅",
    LineVerdict.SAME: "✅",
}


def terminal(judgement: GateResult, *, whole: bool = False) -> RenderableType:
    """Return the result for a terminal.

    Without ``whole``, unchanged figures are left out. If all are unchanged, the first one is shown.
    """
    shown = _shown(judgement, whole)
    names, common = short_names(line.series for line in shown)
    parts = [_sentence(line, names) for line in shown if not _has_figures(line) and line.fails]
    if figures := [line for line in shown if _has_figures(line)]:
        parts.append(_terminal_table(figures, names))
    parts += [_sentence(line, names) for line in shown if not (_has_figures(line) or line.fails)]
    for line in _explained(judgement):
        parts.append(Text(f"{names[line.series]}, {line.what}, by phase", style="bold"))
        parts += [Text(f"  {text}") for text in phase_lines(line)]
    if common:
        parts.append(Text(f"all: {common}", style="dim"))
    parts += [Text(f"note: {note}") for note in judgement.notes]
    parts.append(Text(summary(judgement), style="bold red" if judgement.failed else "bold green"))
    return Group(*parts)


def write_markdown(judgement: GateResult) -> str:
    """Return the result as Markdown, with the unchanged figures in a collapsed section."""
    names, common = short_names(line.series for line in judgement.lines)
    mark = "❌" if judgement.failed else "✅"
    parts = [f"## {mark} weighin check\n\n{markdown(summary(judgement))}"]
    notable = [line for line in judgement.lines if line.verdict is not LineVerdict.SAME]
    if notable:
        parts.append(_markdown_table(notable, names))
    for line in _explained(judgement):
        head = markdown(f"{names[line.series]}, {line.what}, by phase")
        parts.append(f"**{head}**\n\n```\n" + "\n".join(phase_lines(line)) + "\n```")
    if same := [line for line in judgement.lines if line.verdict is LineVerdict.SAME]:
        table = _markdown_table(same, names)
        parts.append(f"<details><summary>{_unremarkable(same)}</summary>\n\n{table}\n\n</details>")
    parts += [f"- {markdown(note)}" for note in judgement.notes]
    if common:
        parts.append(markdown(f"All: {common}"))
    return "\n\n".join(parts) + "\n"


def summary(judgement: GateResult) -> str:
    """Return the result in one line: "gate failed: 1 regressed, 4 same"."""
    counts = Counter(line.title for line in judgement.lines)
    titles = [verdict.value for verdict in LineVerdict]
    titles.insert(titles.index(LineVerdict.SAME), WITHIN_BUDGET)
    words = [f"{counts[title]} {title}" for title in titles if counts[title]]
    return f"gate {'failed' if judgement.failed else 'passed'}: {', '.join(words) or 'nothing to judge'}"


def short_names(names: Iterable[str]) -> tuple[dict[str, str], str]:
    """Return a short name for each measurement, and the words left out because all names share them."""
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


def _terminal_table(lines: Sequence[Line], names: dict[str, str]) -> Table:
    """Return a table that fits a terminal of 80 columns, with several lines of text in a row."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("", overflow="fold")
    table.add_column("what", overflow="fold", min_width=12)
    only_budgets = _only_budgets(lines)
    for heading in ("before", "now", "change", "limit"):
        if not (only_budgets and heading == "before"):
            shown = _OF_BUDGETS.get(heading, heading) if only_budgets else heading
            table.add_column(shown, justify="right", no_wrap=True)
    for line in lines:
        name, what, was, now, change, allowed, grew = _cells(line, names[line.series])
        what += f"\ngrew in {grew.splitlines()[0]}" if grew else ""
        before = () if only_budgets else (was,)
        table.add_row(
            Text(line.title, style=_STYLES[line.verdict]).append(f"\n{name}", style="default"),
            *map(Text, (what, *before, now, change.replace(" (", "\n("), allowed)),
        )
    return table


def _sentence(line: Line, names: dict[str, str]) -> RenderableType:
    head = Text(f"{line.verdict} ", style=_STYLES[line.verdict])
    return head.append(f"{names[line.series]}: {one_line(line.text)}", style="default")


def _only_budgets(lines: Sequence[Line]) -> bool:
    return all(line.is_budget for line in lines)


def _unremarkable(same: Sequence[Line]) -> str:
    """Return as text how many figures are within their budgets, and how many are unchanged."""
    kept = sum(line.title == WITHIN_BUDGET for line in same)
    counts = {WITHIN_BUDGET: kept, "unchanged": len(same) - kept}
    words = [f"{count} {title}" for title, count in counts.items() if count]
    return f"{len(same)} unchanged figures" if not kept else f"figures: {', '.join(words)}"


def _has_figures(line: Line) -> bool:
    return line.now is not None


def _shown(judgement: GateResult, whole: bool) -> Sequence[Line]:
    if whole:
        return judgement.lines
    notable = [line for line in judgement.lines if line.verdict is not LineVerdict.SAME]
    return notable or judgement.lines[:1]  # if all passed, only the line nearest to its bound


def _explained(judgement: GateResult) -> Iterator[Line]:
    """Yield the first failing line of each measurement with phases: the worst, as lines are sorted."""
    seen = set()
    for line in judgement.failed:
        if line.phases and line.series not in seen:
            seen.add(line.series)
            yield line


def _cells(line: Line, name: str) -> list[str]:
    """Return the texts of a line's table columns, without the column of the verdict."""
    metric = line.metric
    if metric is None or line.was is None or line.now is None or line.allowed is None:
        return [name, one_line(line.text), "", "", "", "", ""]
    was = "" if line.is_budget else metric.text(line.was)  # a bound is in the column "limit"
    change, grew = metric.change(line.was, line.now), ""
    if line.grown and line.fails:
        grew = f"{one_line(line.grown.phase)}\n{metric.change(0, line.grown.step)}"
    return [name, line.what, was, metric.text(line.now), change, metric.text(line.allowed), grew]


def _markdown_table(lines: Sequence[Line], names: dict[str, str]) -> str:
    heads = ["verdict", *_HEADINGS[1:]]
    sides = ["---:" if index in _NUMBERS else "---" for index in range(8)]
    rows = [heads, sides]
    for line in lines:
        cells = [f"{_MARKS[line.verdict]} {line.title}", *_cells(line, names[line.series])]
        rows.append([markdown(one_line(cell)) for cell in cells])
    if _only_budgets(lines):
        before = _HEADINGS.index("before")
        rows[0] = [_OF_BUDGETS.get(head, head) for head in heads]
        rows = [row[:before] + row[before + 1 :] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
