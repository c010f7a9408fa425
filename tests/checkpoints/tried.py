"""Try a layout with every verb, and judge each answer: right, refused, or wrong."""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Final

from fork_server import ForkServer
from layouts import VERBS, Layout

HERE: Final = Path(__file__).parent
IN_ZOO: Final = "timm"
"""A package that needs torchvision, which the environment of the zoo has."""

_ZOO: Final = HERE.parents[1] / ".venv-zoo" / "bin" / "python"
STRATEGIES: Final = ("streaming", "transformers", "baseline")
_SETUP: Final = f"""
import sys, warnings
sys.path[:0] = {[str(HERE), str(HERE.parent), str(HERE.parents[1] / "harness")]!r}
import torch, transformers, cells
cells.import_commands()
torch.set_num_threads(1)
import compared
compared.warm_up()
"""
_MAIN: Final = "import runpy; runpy.run_module('weighin', run_name='__main__')"
_COMPARED: Final = "import compared, sys; getattr(compared, sys.argv[1])(*sys.argv[2:])"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a verb: ``right``, ``refused`` or ``WRONG``, and the words that say why."""

    state: str
    words: str = ""


class Missing(Exception):
    """A package that a layout needs is not installed."""


@contextmanager
def server(cache: str | None = None, *, zoo: bool = False) -> Iterator[ForkServer]:
    """Start the process in whose forks everything runs: what they import is imported once.

    ``cache`` is the folder for what weighin keeps, and for the lock of bench: two processes with one of
    them wait for each other.
    ``zoo`` takes the interpreter of ``.venv-zoo``, if that is there.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    variables = {"WEIGHIN_CACHE": cache, "WEIGHIN_LOCK": f"{cache}/lock"} if cache else {}
    setup = f"import os; os.environ.update({variables!r})\n"
    python = _ZOO if zoo and _ZOO.exists() else sys.executable
    with closing(ForkServer(setup + _SETUP, python=python)) as started:
        yield started


def tried(
    layout: Layout, folder: Path, forks: ForkServer, verbs: Sequence[str] = VERBS
) -> dict[str, Verdict]:
    """Make a layout in ``folder``, run the verbs over it, and return what came of each.

    Raises:
        Missing: a package that the layout needs is not installed.
    """
    made = forks.run(_COMPARED, "make", layout.name, folder=folder, timeout_s=300)
    if made.returncode:
        if missing := re.search(r"No module named '(\w+)", made.stderr):
            raise Missing(missing[1])
        return {verb: Verdict("WRONG", f"cannot be made: {made.stderr}") for verb in verbs}
    found = json.loads((folder / "made.json").read_text())
    run = _Run(layout, folder, forks, found["path"], found["is_folder"])
    benched = run.bench() if any(verb in STRATEGIES for verb in verbs) else {}
    return {
        verb: _expected(layout, verb, benched[verb] if verb in benched else getattr(run, verb)())
        for verb in verbs
    }


def _expected(layout: Layout, verb: str, verdict: Verdict) -> Verdict:
    """Return the verdict, or WRONG if it is not what the layout says."""
    pattern, note = layout.refused.get(verb), layout.notes.get(verb, "")
    wrong = ""
    if verdict.state == "refused":
        if pattern is None:
            wrong = "refused"
        elif not re.search(pattern, verdict.words, re.DOTALL):
            wrong = f"refused, but not with {pattern!r}"
    elif verdict.state == "right":
        if pattern is not None:
            wrong = "taken, and should be refused"
        elif not re.search(note, verdict.words, re.DOTALL):
            wrong = f"does not say {note!r}"
    return Verdict("WRONG", f"{wrong}: {verdict.words}") if wrong else verdict


@dataclass(frozen=True, slots=True)
class _Run:
    """The verbs over one checkpoint. Each returns what it did, whatever the layout expects."""

    layout: Layout
    folder: Path
    forks: ForkServer
    path: str
    is_folder: bool

    def _cli(self, verb: str, *arguments: str) -> CompletedProcess[str]:
        options = [f"--set={name}={one}" for name, one in self.layout.options.items()]
        return self.forks.run(
            _MAIN, verb, self.path, *arguments, *options, folder=self.folder, timeout_s=600
        )

    def inspect(self) -> Verdict:
        ended = self._cli("inspect", "--json", "inspected.json")
        if verdict := _not_right(ended):
            return verdict
        answer = json.loads((self.folder / "inspected.json").read_text())
        listed = answer["tensors"]
        if self.is_folder:
            return Verdict("right" if listed else "WRONG", _words(ended))
        truth = json.loads((self.folder / "made.json").read_text())["tensors"]
        found = {one["name"]: [one["shape"], one["dtype"]] for one in listed}
        return Verdict("right", _words(ended)) if found == truth else _differ(found, truth)

    def bench(self) -> dict[str, Verdict]:
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        options = ["--isolation", "process", "--out", "run", "--set", "wait=true", "--strategies"]
        ended = self._cli("bench", *options, ",".join(STRATEGIES))
        path = self.folder / "run" / "records.jsonl"
        if not path.exists():
            verdict = _not_right(ended) or Verdict("WRONG", f"no record: {_words(ended)}")
            return dict.fromkeys(STRATEGIES, verdict)
        verdicts = {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            outcome, why = record["outcome"], str(record["message"] or "")
            state = {"ok": "right", "skipped": "refused"}.get(outcome, "WRONG")
            words = _words(ended) if state == "right" else f"{outcome}: {why}"
            verdicts[record["cell"]["strategy"]] = Verdict(state, words)
        return verdicts

    def predict(self) -> Verdict:
        ended = self._cli("predict", "--strategies", ",".join(STRATEGIES), "--json", "out.json")
        return _not_right(ended) or Verdict("right", _words(ended))

    def recommend(self) -> Verdict:
        ended = self._cli("recommend", "--ram=8g", "--json", "recommended.json")
        if verdict := _not_right(ended):
            return verdict
        answer = json.loads((self.folder / "recommended.json").read_text())
        if (best := answer["recommended"]) in self.layout.refused:
            return Verdict("WRONG", f"recommends {best}, which must refuse")
        if not answer["code"] or "load" in self.layout.refused:
            return Verdict("right", _words(ended))
        if advised := re.search(r"weighin (convert .*)", "\n".join(answer["notes"])):
            saved = self.forks.run(_MAIN, *shlex.split(advised[1]), folder=self.folder)
            if verdict := _not_right(saved):
                return verdict
        return self._compared("recommended", _words(ended))

    def convert(self) -> Verdict:
        keys = ("--keys", "model") if self.is_folder else ()
        ended = self._cli("convert", "converted.safetensors", *keys)
        if verdict := _not_right(ended):
            return verdict
        return self._compared("converted", _words(ended))

    def load(self) -> Verdict:
        return self._compared("load", "", self.layout.name)

    def _compared(self, function: str, words: str, *arguments: str) -> Verdict:
        """Return the verdict on a comparison of ``compared.py``, which prints JSON."""
        ended = self.forks.run(_COMPARED, function, *arguments, folder=self.folder, timeout_s=300)
        if ended.returncode:
            return Verdict("WRONG", ended.stderr[-2000:])
        answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        if "refused" in answer:
            return Verdict("refused", answer["refused"])
        if answer["differences"]:
            return Verdict("WRONG", "; ".join(answer["differences"][:5]))
        return Verdict("right", "\n".join([words, *answer["said"]]).strip())


def _not_right(ended: CompletedProcess[str]) -> Verdict | None:
    """Return the verdict on a command that gave no answer."""
    if ended.returncode == 0:
        return None
    words = _words(ended)
    if ended.returncode == 2 and words.startswith("error: ") and "Traceback" not in words:
        return Verdict("refused", words.removeprefix("error: "))
    return Verdict("WRONG", f"exit status {ended.returncode}: {words[-2000:]}")


def _words(ended: CompletedProcess[str]) -> str:
    """Return what a command said from its error on, or all that it said on standard error."""
    text = ended.stderr.strip()
    at = text.find("error: ")
    return text[at:] if at >= 0 and ended.returncode else text


def _differ(found: dict[str, Any], truth: dict[str, Any]) -> Verdict:
    names = [name for name in found | truth if found.get(name) != truth.get(name)]
    shown = [f"{name} is {found.get(name)}, not {truth.get(name)}" for name in names[:3]]
    return Verdict("WRONG", f"{len(names)} tensors differ: " + "; ".join(shown))
