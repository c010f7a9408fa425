"""Write the page "What weighin reads" from what was tried."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from layouts import VERBS, Layout
from tried import Verdict

from weighin.report.markdown import table_lines

Answers = Mapping[str, Mapping[str, Verdict]]


def masked(verdict: Verdict, folder: Path) -> Verdict:
    """Return the verdict with the temporary folder's path left out of its words."""
    words = verdict.words.replace(f"{folder}/checkpoint/", "").replace(f"{folder}/", "")
    return replace(verdict, words=re.sub(r"\x1b\[[0-9;]*m", "", words))


def text(layouts: Sequence[Layout], answers: Answers) -> str:
    """Return the page: a table for each group, and below it what a refusal says."""
    import datetime

    import torch
    import transformers

    tried = [one for one in layouts if one.name in answers]
    states = [one.state for found in answers.values() for one in found.values()]
    lines = [
        "# What weighin reads",
        "",
        f"`make checkpoints` wrote this page on {datetime.date.today()} with torch {torch.__version__} and"
        f" transformers {transformers.__version__}. It makes a small checkpoint of each layout, and gives it"
        " to verbs of weighin. *right*: what was loaded or written is equal, bit by bit, to what `torch.load` or"
        " `from_pretrained` gives. *refused*: weighin says what the checkpoint is, and what to do next."
        " `load` is `load_pretrained` for the folder of a model, and `load_streaming` for other"
        " checkpoints.",
        "",
        f"{len(tried)} layouts, {len(states)} answers: {states.count('right')} right,"
        f" {states.count('refused')} refused, {states.count('WRONG')} wrong.",
    ]
    if untried := [one.name for one in layouts if one.name not in answers]:
        lines += ["", f"Not tried, because a package is not installed: {', '.join(untried)}."]
    for group in dict.fromkeys(one.group for one in tried):
        members = [one for one in tried if one.group == group]
        lines += ["", f"## {group}", "", *_table(members, answers)]
        lines += _refusals(members, answers)
    return "\n".join(lines) + "\n"


def _table(members: Sequence[Layout], answers: Answers) -> list[str]:
    tried = [verb for verb in VERBS if any(verb in answers[one.name] for one in members)]
    rows = [[named(one), *(answers[one.name][verb].state for verb in tried)] for one in members]
    return list(table_lines(("layout", *tried), rows, names=1 + len(tried)))


def named(layout: Layout) -> str:
    """Return the layout's name and its options, as the page shows them."""
    options = " ".join(f"--{name.replace('_', '-')} {one}" for name, one in layout.options.items())
    return f"{layout.name} (`{options}`)" if options else layout.name


def _refusals(members: Sequence[Layout], answers: Answers) -> list[str]:
    """Return what weighin says of each layout that a verb of the command line refuses."""
    lines = []
    for one in members:
        words = [
            answer.words
            for verb, answer in answers[one.name].items()
            if answer.state == "refused" and verb not in ("transformers", "baseline")
        ]
        if words:
            said = " ".join(line.strip() for line in words[0].splitlines() if line.strip())
            lines.append(f"* {one.name}: `{said.replace('`', chr(39))}`")
    return ["", "What it says:", "", *lines] if lines else []
