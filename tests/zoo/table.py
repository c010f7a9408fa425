"""Write the zoo's results as a page: counts, and the loads that are not equal or ok."""

from collections import Counter
from collections.abc import Iterable, Sequence

from judged import strategies
from loads import Outcome
from running import Tried

BAD = frozenset({"DIFFERENT", "CRASHED", "MISJUDGED"})
FAULTS = ("wrong byte", "lost buffer", "broken tie")
"""The planted faults, with which the names of tries end."""


def bad(tried: Sequence[Tried]) -> bool:
    return any(one.kind in BAD for each in tried for one in (*each.loads, *each.judged))


def worst(outcomes: Iterable[Outcome]) -> str:
    kinds = {one.kind for one in outcomes}
    for kind in ("CRASHED", "DIFFERENT", "MISJUDGED", "refused", "not applicable"):
        if kind in kinds:
            return kind
    return "equal" if kinds else "not tried"


def page(tried: Sequence[Tried], versions: str) -> str:
    parts = [
        "# The zoo: models of torch's tests and of torchvision\n",
        f"`make zoo` wrote this page with {versions}. weighin's `load_streaming` loads each model's checkpoint, and a\n"
        "test compares the model bit by bit with that of torch's `load_state_dict`. Every strategy (way to load) also loads the checkpoint. weighin's\n"
        "verification must accept each right model, and detect each fault that the test plants in it: a wrong byte, a lost buffer, a broken weight tie.\n",
        "## The loader\n", _loader_counts(tried),
        "## The strategies and their verification\n", _strategy_counts(tried),
        "## Loads by the loader that are not equal\n", _rows(tried, "loads"),
        "## Loads by strategies that are not ok\n", _rows(tried, "judged"),
    ]  # fmt: skip
    return "\n".join(parts)


def _loader_counts(tried: Sequence[Tried]) -> str:
    families = sorted({one.case.family for one in tried})
    kinds = ["equal", "refused", "not applicable", "DIFFERENT", "CRASHED"]
    lines = [f"| models | all | {' | '.join(kinds)} |", "| --- |" + " ---: |" * (len(kinds) + 1)]
    for family in families:
        outcomes = Counter(worst(one.loads) for one in tried if one.case.family == family)
        figures = " | ".join(str(outcomes[kind]) for kind in kinds)
        lines.append(f"| {family} | {sum(outcomes.values())} | {figures} |")
    loads = Counter(outcome.kind for each in tried for outcome in each.loads)
    counts = ", ".join(f"{count} {kind}" for kind, count in loads.most_common())
    return "\n".join(
        [*lines, f"\nThe outcomes of the {sum(loads.values())} loads are: {counts}.\n"]
    )


def _strategy_counts(tried: Sequence[Tried]) -> str:
    """Return a table; strategies with the same counts share a row."""
    alike: dict[str, list[str]] = {}
    for name in ("manifest", *(name for name, _, _ in strategies())):
        mine = [one for each in tried for one in each.judged if one.what.partition(",")[0] == name]
        planted = [one for one in mine if one.what.endswith(FAULTS)]
        right = [one for one in mine if not one.what.endswith(FAULTS)]
        found = sum(one.kind == "ok" for one in planted)
        figures = (
            len(right), sum(one.kind == "ok" for one in right), f"{found} of {len(planted)}",
            *(sum(one.kind == kind for one in mine) for kind in ("refused", "MISJUDGED", "CRASHED")),
        )  # fmt: skip
        alike.setdefault(" | ".join(map(str, figures)), []).append(name)
    lines = ["| strategy | unmodified loads | ok | faults detected | refused | MISJUDGED | CRASHED |",
             "| --- |" + " ---: |" * 6]  # fmt: skip
    lines += [f"| {', '.join(names)} | {figures} |" for figures, names in alike.items()]
    return "\n".join([*lines, ""])


def _rows(tried: Sequence[Tried], field: str) -> str:
    """Return a table of the tries that are not ok: one row for each outcome and message."""
    rows = Counter(
        (one.kind, one.detail.replace("|", "\\|").replace("<", "&lt;"))
        for each in tried
        for one in getattr(each, field)
        if one.kind != "ok"
    )
    if not rows:
        return "None.\n"
    lines = ["| outcome | message | tries |", "| --- | --- | ---: |"]
    lines += [
        f"| {kind} | {detail or '-'} | {rows[kind, detail]} |" for kind, detail in sorted(rows)
    ]
    return "\n".join([*lines, ""])
