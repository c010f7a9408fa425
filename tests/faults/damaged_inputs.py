"""Runs, plans, suites and budgets that are damaged: refused with their reason, and never with exit code 1."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from faults import Fault

_DEEP: Final = "[" * 100_000
_DIGITS: Final = "9" * 6_000
Damage = Callable[[Path], object]


def _put(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text)


def _fifo(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


def _folder(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()


def _first(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "base/records.jsonl"
    record = json.loads(path.read_text().splitlines()[0])
    change(record)
    path.write_text(json.dumps(record) + "\n")


def _record(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda folder: _first(folder, change)


def _run_among_results(folder: Path) -> None:
    (folder / "results/x").mkdir(parents=True)
    _put("results/x/records.jsonl", f'{{"x":{_DEEP}\n', folder)


RECORDS: Final = "base/records.jsonl"
_RECORDS: Final[dict[str, Damage]] = {
    "100,000 deep": partial(_put, RECORDS, f'{{"schema":1,"x":{_DEEP}\n'),
    "an integer of 6,000 digits": partial(_put, RECORDS, f'{{"schema":{_DIGITS}}}\n'),
    "NUL bytes": partial(_put, RECORDS, "\0" * 5000 + "\n"),
    "a list": partial(_put, RECORDS, "[]\n"),
    "a FIFO": partial(_fifo, RECORDS),
    "a folder": partial(_folder, RECORDS),
    "not UTF-8": lambda folder: (folder / RECORDS).write_bytes(b"\xff\xfe{}\n"),
    "an infinite figure": _record(lambda one: one.update(load_ns=float("inf"))),
    "a negative time": _record(lambda one: one.update(load_ns=-1)),
    "a phase named by a number": _record(lambda one: one["phases"][0].update(name=7)),
}
_VERBS: Final = {
    "report": ("report", "base"),
    "check": ("check", "base", "--budget", "*: peak_rss <= 3 x model"),
}
_YAML: Final[dict[str, str]] = {
    "100,000 deep": "schema: 1\nmeasured: " + _DEEP,
    "an integer of 6,000 digits": f"schema: {_DIGITS}\n",
    "a reference to itself": "schema: &a [*a]\n",
    "nested references": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(
        f"{n}: &{n} [{','.join([f'*{p}'] * 9)}]\n"
        for p, n in zip("abcdefg", "bcdefgh", strict=True)
    ),
    "an object of Python": "schema: !!python/object/apply:os.system ['touch RAN']\n",
    "a tab": "schema:\t1\n\tmodels: x\n",
    "a control character": "schema: \x1b[31m\n",
}
_READS_YAML: Final = {
    "suite": ("bench", "--suite", "./given.yaml"),
    "baseline": ("check", "base", "--baseline", "given.yaml"),
}
_PLAN: Final[dict[str, Damage]] = {
    "100,000 deep": partial(_put, "base/plan.json", _DEEP),
    "an integer of 6,000 digits": partial(_put, "base/plan.json", f'{{"schema":{_DIGITS}}}'),
    "a FIFO": partial(_fifo, "base/plan.json"),
    "half of itself": lambda folder: (folder / "base/plan.json").write_text((folder / "base/plan.json").read_text()[:200]),
    "a list": partial(_put, "base/plan.json", "[]"),
}  # fmt: skip

FAULTS: Final = [
    *(
        Fault(f"{verb}: records are {what}", "Damaged input", words, "2", "^error: |\nerror: ", prepare=damage)
        for verb, words in _VERBS.items()
        for what, damage in _RECORDS.items()
    ),
    *(
        Fault(f"resume: the plan is {what}", "Damaged input", ("bench", "--resume", "base", "--trust"), "2", "(?m)^error: ", prepare=damage)
        for what, damage in _PLAN.items()
    ),
    *(
        Fault(f"{kind}: the YAML is {what}", "Damaged input", words, "2", "(?m)^error: ", prepare=partial(_put, "given.yaml", text), absent=("RAN",))
        for kind, words in _READS_YAML.items()
        for what, text in _YAML.items()
    ),
    Fault("suite: a FIFO", "Damaged input", ("bench", "--suite", "./given.yaml"), "2", "(?m)^error: ", prepare=partial(_fifo, "given.yaml")),
    Fault("suite: 100,000,000 repeats", "Damaged input", ("bench", "gpt2-tiny", "--isolation", "process", "--repeats", "100000000", "-s", "streaming"), "2", "(?m)^error: "),
    Fault("check: a budget 100,000 deep", "Damaged input", ("check", "base", "--budget", "(" * 90_000), "2", "(?m)^error: "),
    Fault("bench: kwargs 100,000 deep", "Damaged input", ("bench", "gpt2-tiny", "--set", f"kwargs={_DEEP}"), "2", "(?m)^error: "),
    Fault("bench: kwargs with 6,000 digits", "Damaged input", ("bench", "gpt2-tiny", "--set", f'kwargs={{"n_layer": {_DIGITS}}}'), "2", "(?m)^error: "),
    Fault("inspect: a FIFO as the checkpoint", "Damaged input", ("inspect", "given.pt"), "2", "(?m)^error: ", prepare=partial(_fifo, "given.pt")),
    Fault("inspect: a checkpoint of NUL bytes", "Damaged input", ("inspect", "given.pt"), "2", "(?m)^error: ", prepare=partial(_put, "given.pt", "\0" * 9999)),
    Fault("recommend: a damaged run in results/", "Damaged input", ("recommend", "gpt2-tiny", "--ram", "8g"), "0", prepare=_run_among_results),
]  # fmt: skip
