"""Write the page "What weighin reads" from what was tried."""

from collections.abc import Mapping, Sequence

from layouts import VERBS, Layout
from tried import Verdict

Answers = Mapping[str, Mapping[str, Verdict]]


def text(layouts: Sequence[Layout], answers: Answers) -> str:
    """Return the page: for each group the layouts that are read equally, and those that are refused."""
    import datetime

    import torch
    import transformers

    tried = [one for one in layouts if one.name in answers]
    states = [one.state for found in answers.values() for one in found.values()]
    lines = [
        "# What weighin reads",
        "",
        f"`make checkpoints` made a small checkpoint of each layout on {datetime.date.today()}, with torch {torch.__version__} and"
        f" transformers {transformers.__version__}, and gave each checkpoint to eight readers: {', '.join(VERBS)}. `streaming`,"
        " `transformers` and `baseline` are strategies of `weighin bench`; `load` is one of weighin's two Python functions:"
        " `load_pretrained` for the folder of a model, `load_streaming` for any other checkpoint.",
        "",
        "* **equal**: what all readers read equals what `torch.load` or `from_pretrained` read, bit by bit.",
        "* **refused**: an error says what the file is, and what to do instead.",
        "* **equal**, but refused by X: X refuses these layouts; all other readers are equal.",
        "",
        f"{len(tried)} layouts, {len(states)} answers: {states.count('right')} equal,"
        f" {states.count('refused')} refused, {states.count('WRONG')} wrong.",
    ]
    if untried := [one.name for one in layouts if one.name not in answers]:
        lines += ["", f"Not tried, because a package is not installed: {', '.join(untried)}."]
    for group in dict.fromkeys(one.group for one in tried):
        members = [one for one in tried if one.group == group]
        lines += ["", f"## {group}", "", *_answers(members, answers)]
    return "\n".join(lines) + "\n"


def _answers(members: Sequence[Layout], answers: Answers) -> list[str]:
    """Return a line for all layouts with the same answers."""
    alike: dict[str, list[str]] = {}
    for one in members:
        alike.setdefault(_who(answers[one.name]), []).append(named(one))
    return [f"* {who}: {'; '.join(names)}" for who, names in alike.items()]


def _who(given: Mapping[str, Verdict]) -> str:
    """Return which readers are equal and which refuse: "equal, but refused by baseline"."""
    verbs = {
        state: [verb for verb in VERBS if verb in given and given[verb].state == state]
        for state in ("right", "refused", "WRONG")
    }
    if verbs["WRONG"]:
        return f"**WRONG** by {', '.join(verbs['WRONG'])}"
    if not verbs["right"]:
        return "**refused**"
    if not verbs["refused"]:
        return "**equal**"
    if len(verbs["refused"]) < len(verbs["right"]):
        return f"**equal**, but refused by {', '.join(verbs['refused'])}"
    return f"**refused**, but equal by {', '.join(verbs['right'])}"


def named(layout: Layout) -> str:
    """Return the layout's name and its options, as the page shows them."""
    options = " ".join(f"--set {name}={one}" for name, one in layout.options.items())
    return f"{layout.name} (`{options}`)" if options else layout.name
