"""Write the page "What weighin reads" from what was tried."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from layouts import VERBS, Layout
from tried import Verdict

Answers = Mapping[str, Mapping[str, Verdict]]
_UNTOLD: Final = frozenset({"transformers", "baseline"})
"""Strategies that read few layouts: their refusals need no words."""
_SKIPPED: Final = "choose another strategy"
"""The repair of a run whose cells are all skipped: its message says more."""


def masked(verdict: Verdict, folder: Path) -> Verdict:
    """Return the verdict with the temporary folder's path left out of its words."""
    words = re.sub(r"(?<![\w/])checkpoint/", "", verdict.words.replace(f"{folder}/", ""))
    return replace(verdict, words=re.sub(r"\x1b\[[0-9;]*m", "", words))


def text(layouts: Sequence[Layout], answers: Answers) -> str:
    """Return the page: for each group the layouts that are right, and those that are refused with the repair."""
    import datetime

    import torch
    import transformers

    tried = [one for one in layouts if one.name in answers]
    states = [one.state for found in answers.values() for one in found.values()]
    lines = [
        "# What weighin reads",
        "",
        f"`make checkpoints` wrote this page on {datetime.date.today()} with torch {torch.__version__} and"
        f" transformers {transformers.__version__}. The command makes a small checkpoint of each layout, and"
        f" gives it to eight readers: {', '.join(VERBS)}. `load` is `load_pretrained` for the folder of a model, and"
        " `load_streaming` for other checkpoints; `streaming`, `transformers` and `baseline` are strategies.",
        "",
        "* **right**: the loaded or written tensors equal those of `torch.load` or `from_pretrained`, bit by bit.",
        "* **refused**: the error says what the file is, and then the repair. This page lists the repairs.",
        "",
        f"{len(tried)} layouts, {len(states)} answers: {states.count('right')} right,"
        f" {states.count('refused')} refused, {states.count('WRONG')} wrong.",
    ]
    if untried := [one.name for one in layouts if one.name not in answers]:
        lines += ["", f"Not tried, because a package is not installed: {', '.join(untried)}."]
    for group in dict.fromkeys(one.group for one in tried):
        members = [one for one in tried if one.group == group]
        lines += ["", f"## {group}", "", *_answers(members, answers), *_repairs(members, answers)]
    return "\n".join(lines) + "\n"


def _answers(members: Sequence[Layout], answers: Answers) -> list[str]:
    """Return the layouts whose refusals need no words, one line for all with the same answers."""
    alike: dict[str, list[str]] = {}
    for one in members:
        if not _words(answers[one.name]):
            alike.setdefault(_who(answers[one.name]), []).append(named(one))
    return [f"* {who}: {'; '.join(names)}" for who, names in alike.items()]


def _repairs(members: Sequence[Layout], answers: Answers) -> list[str]:
    """Return the repairs, each with the layouts that need it, and who refuses them."""
    alike: dict[tuple[str, str], list[str]] = {}
    for one in members:
        if words := _words(answers[one.name]):
            alike.setdefault((_who(answers[one.name]), _repair(words)), []).append(named(one))
    found: dict[str, list[str]] = {}
    for (who, repair), names in alike.items():
        found.setdefault(who, []).append(f"    * {'; '.join(names)}: `{repair}`")
    return [line for who, lines in found.items() for line in (f"* {who}:", *lines)]


def _words(given: Mapping[str, Verdict]) -> str:
    """Return the words of the first verb that refuses; empty if only strategies without words do."""
    told = (one for verb, one in given.items() if verb not in _UNTOLD)
    return next((one.words for one in told if one.state == "refused"), "")


def _repair(words: str) -> str:
    """Return the repair in the words of an error."""
    message, *repair = [line.strip() for line in words.splitlines() if line.strip()]
    text = ". ".join(repair) or message
    if text.startswith(_SKIPPED):
        text = "; ".join(message.split("; ")[1:]) or message
    return text.replace("`", "'")


def _who(given: Mapping[str, Verdict]) -> str:
    """Return who is right and who refuses: "right, but refused by baseline"."""
    verbs = {
        state: [verb for verb in VERBS if verb in given and given[verb].state == state]
        for state in ("right", "refused", "WRONG")
    }
    if verbs["WRONG"]:
        return f"**WRONG** by {', '.join(verbs['WRONG'])}"
    if not verbs["right"]:
        return "**refused**"
    if not verbs["refused"]:
        return "**right**"
    if len(verbs["refused"]) < len(verbs["right"]):
        return f"**right**, but refused by {', '.join(verbs['refused'])}"
    return f"**refused**, but right by {', '.join(verbs['right'])}"


def named(layout: Layout) -> str:
    """Return the layout's name and its options, as the page shows them."""
    options = " ".join(f"--{name.replace('_', '-')} {one}" for name, one in layout.options.items())
    return f"{layout.name} (`{options}`)" if options else layout.name
