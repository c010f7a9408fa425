"""The zoo's result as a page: counts, all that is not equal or ok, and what was covered."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from judged import strategies
from loads import Outcome
from running import Tried

BAD = frozenset({"DIFFERENT", "CRASHED", "MISJUDGED"})


def bad(tried: Sequence[Tried]) -> bool:
    """Tell whether anything is different, crashed or misjudged."""
    return any(one.kind in BAD for each in tried for one in (*each.loads, *each.judged))


def worst(outcomes: Iterable[Outcome]) -> str:
    """Return one word for all outcomes of a model."""
    kinds = {one.kind for one in outcomes}
    for kind in ("CRASHED", "DIFFERENT", "MISJUDGED", "refused", "not applicable"):
        if kind in kinds:
            return kind
    return "equal" if kinds else "not tried"


def page(tried: Sequence[Tried], versions: str) -> str:
    """Return the whole page as Markdown."""
    parts = [
        "# The zoo: models that nobody here wrote\n",
        f"Made by `make zoo` with {versions}. Each model's checkpoint is loaded by `load_streaming`, and compared bit by bit with\n"
        "what torch's own `load_state_dict` gives; and by every strategy, judged as a worker judges it.\n",
        "## The loader\n", _loader_counts(tried),
        "## The strategies, and what judges them\n", _strategy_counts(tried),
        "## What is not equal\n", _rows(tried, "loads"),
        "## What is not ok\n", _rows(tried, "judged"),
        "## Covered\n", _covered(tried),
    ]  # fmt: skip
    return "\n".join(parts)


def _loader_counts(tried: Sequence[Tried]) -> str:
    families = sorted({one.case.family for one in tried})
    kinds = ["equal", "refused", "not applicable", "DIFFERENT", "CRASHED"]
    lines = [f"| models | all | {' | '.join(kinds)} |", "| --- |" + " ---: |" * (len(kinds) + 1)]
    for family in families:
        found = Counter(worst(one.loads) for one in tried if one.case.family == family)
        figures = " | ".join(str(found[kind]) for kind in kinds)
        lines.append(f"| {family} | {sum(found.values())} | {figures} |")
    loads = Counter(one.kind for each in tried for one in each.loads)
    said = ", ".join(f"{count} {kind}" for kind, count in loads.most_common())
    return "\n".join([*lines, f"\n{sum(loads.values())} loads: {said}.\n"])


def _strategy_counts(tried: Sequence[Tried]) -> str:
    names = ["truth", *(name for name, _, _ in strategies())]
    lines = ["| strategy | right loads | ok | wrong byte: found | lost buffer: found | broken tie: found "
             "| refused | MISJUDGED | CRASHED |", "| --- |" + " ---: |" * 8]  # fmt: skip
    for name in names:
        mine = [one for each in tried for one in each.judged if one.what.partition(",")[0] == name]
        planted = {
            fault: [one for one in mine if one.what.endswith(fault)]
            for fault in ("wrong byte", "lost buffer", "broken tie")
        }
        right = [one for one in mine if not any(one in group for group in planted.values())]
        figures = [len(right), sum(one.kind == "ok" for one in right)]
        cells = [str(figure) for figure in figures]
        cells += [f"{sum(o.kind == 'ok' for o in g)} of {len(g)}" for g in planted.values()]
        cells += [
            str(sum(o.kind == kind for o in mine)) for kind in ("refused", "MISJUDGED", "CRASHED")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _rows(tried: Sequence[Tried], field: str) -> str:
    """Return a table of all that is not ok: one row for each outcome that is told in the same words."""
    found: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for each in tried:
        for one in getattr(each, field):
            if one.kind != "ok":
                whats, labels = found.setdefault((one.kind, _plain(one.detail)), ({}, {}))
                whats[one.what] = labels[each.case.label] = None
    if not found:
        return "Nothing.\n"
    lines = ["| outcome | what | tries | models |", "| --- | --- | --- | --- |"]
    for (kind, detail), (tries, named) in sorted(found.items()):
        lines.append(f"| {kind} | {detail or '-'} | {_some(list(tries), 4)} | {_names(named)} |")
    return "\n".join([*lines, ""])


def _plain(detail: str) -> str:
    """Return a detail without the names of temporary folders, and safe within a table."""
    words = (w.rpartition("/")[2] if "weighin-zoo-" in w else w for w in detail.split())
    return " ".join(words).replace("|", "\\|").replace("<", "&lt;")


def _some(names: Sequence[str], shown: int) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _names(labels: Iterable[str]) -> str:
    """Return the names of models, those that differ in their number only as one."""
    names = Counter(label.partition("[")[0] for label in labels)
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in names.items())


def _covered(tried: Sequence[Tried]) -> str:
    families = groupby(tried, key=lambda one: one.case.family)
    lines = [f"* **{name}**: {_names(one.case.label for one in each)}" for name, each in families]
    return "\n".join([*lines, ""])
