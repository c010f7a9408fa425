"""Write the page "What weighin reads" from what was tried."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from layouts import VERBS, Layout
from tried import Verdict

from weighin.report.markdown import table_lines

Answers = Mapping[str, Mapping[str, Verdict]]
STATES: Final = ("right", "refused", "WRONG")


def masked(verdict: Verdict, folder: Path) -> Verdict:
    """Return the verdict with the temporary folder's path left out of its words."""
    words = verdict.words.replace(f"{folder}/", "").replace("checkpoint/", "")
    return replace(verdict, words=re.sub(r"\x1b\[[0-9;]*m", "", words))


def text(layouts: Sequence[Layout], answers: Answers) -> str:
    """Return the page: a table for each group, and below it the words of each refusal."""
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
        " gives it to the verbs of weighin. *right*: the loaded or written tensors equal those of `torch.load` or"
        " `from_pretrained`, bit by bit. *refused*: weighin names the kind of the checkpoint and the next step."
        " `load` is `load_pretrained` for the folder of a model, and `load_streaming` for other"
        " checkpoints.",
        "",
        f"The verbs: {', '.join(VERBS)}.",
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
    """Return a row for each layout, with the verbs of each answer."""
    found = {verdict.state for one in members for verdict in answers[one.name].values()}
    states = [state for state in STATES if state in found]
    rows = [
        [named(one), *(_verbs(answers[one.name], state) for state in states)] for one in members
    ]
    return list(table_lines(("layout", *states), rows, names=1 + len(states)))


def _verbs(given: Mapping[str, Verdict], state: str) -> str:
    """Return the verbs that gave this answer: "all", "-" for none, or their names."""
    verbs = [verb for verb in VERBS if verb in given and given[verb].state == state]
    if len(verbs) in (0, len(given)):
        return "all" if verbs else "-"
    others = [verb for verb in VERBS if verb in given and verb not in verbs]
    if len(others) < len(verbs):
        return f"all but {', '.join(others)}"
    return ", ".join(verbs)


def named(layout: Layout) -> str:
    """Return the layout's name and its options, as the page shows them."""
    options = " ".join(f"--{name.replace('_', '-')} {one}" for name, one in layout.options.items())
    return f"{layout.name} (`{options}`)" if options else layout.name


def _refusals(members: Sequence[Layout], answers: Answers) -> list[str]:
    """Return the words of each refusal, with the layouts that a verb of the command line refuses so."""
    sharing: dict[str, list[str]] = {}
    for one in members:
        words = [
            answer.words
            for verb, answer in answers[one.name].items()
            if answer.state == "refused" and verb not in ("transformers", "baseline")
        ]
        if words:
            said = ". ".join(line.strip() for line in words[0].splitlines() if line.strip())
            sharing.setdefault(said.replace("`", "'"), []).append(one.name)
    lines = [f"* {'; '.join(names)}: `{said}`" for said, names in sharing.items()]
    return ["", "Words of the refusals:", "", *lines] if lines else []
