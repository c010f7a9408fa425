"""Measure the published runs again, or list the runs whose code has changed since.

``make publish`` measures every run of results/published/runs.yaml into results/publishing, and moves
the new runs into place when all are complete. If the command is stopped, the next call resumes it. The
command refuses to start while other programs use the machine, and leaves out the runs on a GPU if there
is none. ``make publish ARGS=--status`` measures and writes nothing. ::

    .venv/bin/python -m pages.publish [--status] [--anyway] [RUN ...]
"""

import argparse
import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from pages.run_tables import PREDICTED
from weighin.cell import Cell
from weighin.probes import environment, gpu_memory
from weighin.records import run_folder
from weighin.records.series import Measured
from weighin.result import Outcome, Result
from weighin.show import style, words
from weighin.show.timeline import draw_timelines
from weighin.text import few

ROOT: Final = Path(__file__).resolve().parents[1]
PUBLISHED: Final = Path("results/published")
PUBLISHING: Final = Path("results/publishing")
FOLDERS: Final = {
    "converting": "results/folders/converting",
    "published": "results/folders/Qwen3-0.6B",
    "releases": "results/folders/releases",
}
"""The folders that ``benchmarks/folders.py`` makes, and where runs name them."""
DECIDING: Final = ("worker", "checkpoint", "stream", "models")
"""The folders of weighin whose code, beside a strategy's file, decides what a load is measured to need."""
CURRENT: Final = "the current code"
QUIET_LOAD: Final = 0.3
"""The largest load average (1 minute) of an idle machine; an idle desktop has 0.1."""
_WRONG: Final = (
    Outcome.MEASUREMENT_FAILED, Outcome.WRONG_WEIGHTS, Outcome.STRATEGY_FAILED, Outcome.USE_FAILED,
)  # fmt: skip
_OF_RELEASES: Final = (Outcome.SKIPPED, Outcome.STRATEGY_FAILED, Outcome.WRONG_WEIGHTS)
"""What a release that cannot be installed, or cannot load a model, leads to: that is published, too."""
_WITH_FAILURES: Final = (4, 5)
"""The exit codes of a run with such outcomes."""


@dataclass(frozen=True)
class Run:
    """A published run: its name, its command and its last results."""

    name: str
    command: tuple[str, ...]
    results: tuple[Result, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="*", metavar="RUN", help="only these runs; default: all")
    parser.add_argument("--status", action="store_true", help="list the runs of older code")
    parser.add_argument(
        "--anyway", action="store_true", help="measure on a busy machine or with uncommitted code"
    )
    arguments = parser.parse_args()
    os.chdir(ROOT)
    runs = read(ROOT, arguments.runs)
    if arguments.status:
        print("\n".join(status(runs, ROOT)))
        return
    runs, left_out = measurable(runs, gpu_memory.look().why)
    for line in left_out:
        print(line)
    if not arguments.anyway and (why := why_not(os.getloadavg()[0], environment.code())):
        sys.exit(f"error: {why}")
    for run in runs:
        measure(run)
    for run in runs:
        put_in_place(PUBLISHING / run.name, PUBLISHED / run.name)
        predict(run, PUBLISHING / run.name)
    shutil.rmtree(PUBLISHING)
    subprocess.run(["make", "--no-print-directory", "pages"], check=True)
    print("done: check `git diff` and the texts around the tables, then commit")


def read(root: Path, names: Sequence[str] = ()) -> list[Run]:
    """Return all published runs, or only the runs in ``names``, in the order of runs.yaml."""
    commands = yaml.safe_load((root / PUBLISHED / "runs.yaml").read_text(encoding="utf-8"))
    if unknown := [name for name in names if name not in commands]:
        sys.exit(f"error: no published run {unknown[0]!r}; there are {', '.join(commands)}")
    runs = []
    for name in [one for one in commands if not names or one in names]:
        folder = root / PUBLISHED / name
        results = run_folder.read(folder).results if folder.exists() else ()
        runs.append(Run(name, tuple(shlex.split(commands[name])), tuple(results)))
    return runs


def status(runs: Sequence[Run], root: Path) -> list[str]:
    """Return a line per run and per set of predictions: its commit, its date, and what changed since."""
    lines, stale = [], []
    for run in runs:
        lines.append(f"{run.name}: never measured")
        states = [""]
        if run.results:
            commits = sorted({str(one.environment.get("git_commit")) for one in run.results})
            states = [since(root, commit, run) for commit in commits]
            lines[-1] = f"{run.name}: {words.code(run.results)}: {'; '.join(states)}"
        if (path := root / PUBLISHED / run.name / PREDICTED).exists():
            told = json.loads(path.read_text(encoding="utf-8"))
            made = words.when_and_what([(told["environment"], told["predicted_at"])])
            states.append(since(root, told["environment"]["git_commit"], run, "predict"))
            lines.append(f"  its predictions: {made}: {states[-1]}")
        if {*states} != {CURRENT}:
            stale.append(run.name)
    older = f"{len(stale)} of {len(runs)} are older than the current code or were never measured"
    return [
        *lines,
        f"{older}: {', '.join(stale)}" if stale else f"all {len(runs)} are of {CURRENT}",
    ]


def since(root: Path, commit: str, run: Run, *more: str) -> str:
    """Say which files have changed since a commit, of those that decide a run's figures."""
    folders = [f"harness/weighin/{name}" for name in (*DECIDING, *more)]
    strategies = {one.cell.strategy for one in run.results}
    files = [f":(glob)strategies/**/{name}.py" for name in sorted(strategies)]
    command = ["git", "--no-optional-locks", "-C", str(root), "diff", "--name-only", commit]
    done = subprocess.run(
        [*command, "--", *folders, *files], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"cannot tell: git does not know commit {commit[:10]}"
    used = {one.cell.model.builder for one in run.results}

    def decides(name: str) -> bool:
        """Tell whether a file has other code, and builds no models of a library that no cell uses."""
        if "/models/pretrained_" in name and not any(f".{Path(name).stem}:" in one for one in used):
            return False
        return _code(root, name) != _code(root, name, commit)

    changed = [Path(name).name for name in filter(decides, done.stdout.split())]
    return f"OLDER than {CURRENT} ({few(changed)} changed)" if changed else CURRENT


def _code(root: Path, name: str, commit: str = "") -> str:
    """Return a file as it lies there, or as of a commit; of Python, without comments and texts (of several words)."""
    then = ["git", "-C", str(root), "show", f"{commit}:{name}"]  # fails if it was not there
    if commit:
        text = str(subprocess.run(then, capture_output=True, text=True, check=False).stdout)
    else:
        text = (root / name).read_text(encoding="utf-8") if (root / name).exists() else ""
    if not name.endswith(".py"):
        return text
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree := ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node):
            node.body.pop(0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            node.value = ""
    return ast.dump(tree)


def measurable(runs: Sequence[Run], no_gpu: str) -> tuple[list[Run], list[str]]:
    """Return the runs that this machine can measure, and a line for each that it cannot, for ``no_gpu``."""
    can = [run for run in runs if not no_gpu or not any(one.cell.needs_gpu for one in run.results)]
    return can, [f"left out, because {no_gpu}: {run.name}" for run in runs if run not in can]


def why_not(load: float, code: dict[str, object]) -> str:
    """Return the reason why a run measured now must not be published; empty if it may be."""
    if load > QUIET_LOAD:
        return (
            f"this machine is busy: load average {load:.2f}, above {QUIET_LOAD}. Times would be"
            " wrong. Stop other programs and wait a minute, or use ARGS=--anyway"
        )
    if code["git_dirty"] is not False:
        return (
            "tracked files differ from the commit that the records would name. Commit first, or use"
            " ARGS=--anyway"
        )
    return ""


def measure(run: Run) -> None:
    """Measure a run, or resume it, in the folder results/publishing."""
    folder = PUBLISHING / run.name
    verb, *rest = run.command
    arguments = [verb, *rest, "--out", str(folder)]
    if (folder / run_folder.PLAN).exists():
        now = str(environment.code()["git_commit"])
        then = {str(one.environment.get("git_commit")) for one in run_folder.read(folder).results}
        if then - {now}:
            sys.exit(
                f"error: {folder} was started at commit {', '.join(one[:10] for one in then)}, but this"
                f" is {now[:10]}: check out that commit to resume, or start again: rm -r {folder}"
            )
        arguments = [verb, "--resume", str(folder)]
    # A command, or the suite that it names, may name models that are made here.
    texts = [Path(one).read_text("utf-8") if one.endswith(".yaml") else one for one in run.command]
    for which, place in FOLDERS.items():
        if any(place in text for text in texts):
            subprocess.run([sys.executable, "benchmarks/folders.py", which], check=True)
    print(f"\nweighin {shlex.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "weighin", *arguments], check=False)
    found = run_folder.read(folder).results if (folder / run_folder.RECORDS).exists() else []
    has_releases = any(one.cell.releases for one in found)
    if done.returncode and not (has_releases and done.returncode in _WITH_FAILURES):
        sys.exit(f"error: weighin ended with {done.returncode}. The same command resumes it")
    measured = {one.cell.strategy for one in found if one.outcome is not Outcome.SKIPPED}
    for one in found:  # a strategy may be skipped for some models only
        if has_releases and one.outcome in _OF_RELEASES:
            continue
        is_skipped = one.outcome is Outcome.SKIPPED
        if one.outcome in _WRONG or (is_skipped and one.cell.strategy not in measured):
            sys.exit(f"error: {folder}: {one.cell.strategy} is {one.outcome}: {one.message}")


def has_timeline(cells: Sequence[Cell]) -> bool:
    """Tell whether a timeline of a run has one panel, and few lines in it."""
    panels = {
        (one.ram_limit_bytes, one.model.title, one.disk_bytes_per_s, one.disk_latency_ns)
        for one in cells
    }
    return len(panels) == 1 and cells[0].operation != "command" and not cells[0].releases


def is_predicted(cells: Sequence[Cell]) -> bool:
    """Tell whether a run's loads can be predicted: with the packages that are installed here."""
    return all(one.operation == "load" and not one.releases for one in cells)


def put_in_place(measured: Path, published: Path) -> None:
    """Replace a published run's records and timeline by the new run's records and timeline.

    Paths in the repository become relative to it, as in the path of an adapter. The samples are not
    kept: ``make pages`` draws all pictures but the timeline from the records.
    """
    ready = measured / "published"
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir()
    records = (measured / run_folder.RECORDS).read_text(encoding="utf-8")
    (ready / run_folder.RECORDS).write_text(records.replace(f"{ROOT}/", ""), encoding="utf-8")
    run = Measured.of(measured, run_folder.read(measured))
    if has_timeline([one.cell for one in run.results]):
        (figure,) = draw_timelines(run)
        (ready / "timeline.svg").write_text(style.svg(figure), encoding="utf-8")
    shutil.rmtree(published, ignore_errors=True)
    ready.rename(published)


def predict(run: Run, measured: Path) -> None:
    """Predict the loads of a measured run, and store the predictions beside its published records."""
    if is_predicted([one.cell for one in run_folder.read(measured).results]):
        told = str(PUBLISHED / run.name / PREDICTED)
        command = [sys.executable, "benchmarks/predicted_runs.py", str(measured), "--json", told]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
