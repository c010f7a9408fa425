"""Change the code in one small way at a time, and tell which changes no test notices.

    PYTHONPATH=harness:tests python tests/mutation [--sample N] [--seed N] [--jobs N] [MODULE ...]     (make mutation)

A mutant is a module with one change of ``operators``. It is killed if one of its module's tests fails or
does not end. ``chosen_tests`` names the files of these tests, five of unit and two or three of contract, which run one
after the other until one fails. All need neither root, nor cgroups, nor an engine; those that fail here without a change, or exceed ``--minutes`` of a processor's
time in all, are left out. Without ``--sample``, every mutant is tried, which takes a day.

``--fixed`` draws from all packages (``kill_rates``), and prints their kill rates beside those that were kept.

A mutant may do anything, such as kill processes that it should not. As root, this program therefore
becomes the user nobody, in a pid namespace of its own; as another user, that user's processes are at risk.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Final

from copies import ROOT, Copy, Known, Trial
from kill_rates import KEPT, Log, fixed_draw, found, kept_rates, rates, table, to_keep
from operators import Mutant

PACKAGE: Final = ROOT / "harness" / "weighin"
MODULES: Final = ("isolation", "gate", "records", "predict", "run")
_NOBODY: Final = 65534
# The environment may lie in root's home, so that nobody must be able to search it.
_SEARCH: Final = "-all,+dac_read_search"
_APART: Final = (
    "setpriv", "--pdeathsig=KILL", "unshare", "--pid", "--mount-proc", "--fork", "--kill-child",
    "sh", "-c", '"$@"; exit "$?"', "sh",  # the first process of a namespace reaps orphans
    "setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups",
    f"--inh-caps={_SEARCH}", f"--ambient-caps={_SEARCH}",
)  # fmt: skip


def _trials(
    drawn: Sequence[Mutant], jobs: int, most_s: float
) -> Iterator[tuple[Mutant, Trial, float]]:
    """Yield what each mutant's tests did, and how long they took, in ``jobs`` copies side by side."""
    copies, known = SimpleQueue[Copy](), Known()

    def tried(mutant: Mutant) -> tuple[Mutant, Trial, float]:
        code, start = copies.get(), monotonic()
        try:
            return mutant, code.tried(mutant), monotonic() - start
        finally:
            copies.put(code)

    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ThreadPoolExecutor(jobs) as threads,
    ):
        for number in range(jobs):
            copies.put(Copy(Path(folder, str(number)), most_s, known))
        try:
            for done in as_completed([threads.submit(tried, mutant) for mutant in drawn]):
                yield done.result()
        finally:
            threads.shutdown(cancel_futures=True)
            for _ in range(jobs):
                copies.get().close()


def _try(drawn: Sequence[Mutant], log: Log, asked: argparse.Namespace) -> int:
    """Try the mutants that the log does not know yet; print the survivors and rates of all."""
    left = [mutant for mutant in drawn if mutant not in log.trials]
    for mutant, trial, seconds in _trials(left, asked.jobs, 60 * asked.minutes) if left else ():
        log.add(mutant, trial)
        word, by = ("killed", f"  by {trial.killed_by}") if trial.killed_by else ("survives", "")
        number = len(log.trials)
        print(f"{number:4} {word:8} {seconds:5.1f} s  {mutant}{by}", flush=True)
    alive = [mutant for mutant in drawn if not log.trials[mutant].killed_by]
    score = 100 * (len(drawn) - len(alive)) / max(len(drawn), 1)
    print(f"\n{score:.1f} % killed: {len(drawn) - len(alive)} of {len(drawn)}. Survivors:")
    print(*(mutant.shown((PACKAGE / mutant.module).read_text()) for mutant in alive), sep="\n")
    if asked.fixed:
        before = kept_rates(json.loads(KEPT.read_text())) if KEPT.exists() else {}
        print("", table(rates({one: log.trials[one] for one in drawn}), before), sep="\n")
    return int(score < asked.least)


def _keep(drawn: Sequence[Mutant], log: Log, seed: int) -> None:
    """Write the fixed draw's rates to ``kill-rates.json``, with the commit whose code was measured."""
    measured = ("--", "harness", "tests/unit", "tests/contract")
    if subprocess.check_output(["git", "status", "--porcelain", *measured], cwd=ROOT):
        raise SystemExit(
            "harness or these tests are not as committed: commit them, then measure again"
        )
    command = ["git", "log", "-1", "--format=%H", *measured]
    commit = subprocess.check_output(command, cwd=ROOT, text=True).strip()[:8]
    kept = to_keep({mutant: log.trials[mutant] for mutant in drawn}, commit, seed)
    KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("modules", nargs="*", help="files or folders in harness/weighin")
    add("--fixed", action="store_true", help="draw from all packages; compare with the kept rates")
    add("--sample", type=int, help="try so many mutants, drawn at random; of --fixed, the first")
    add("--seed", type=int, default=0, help="of the draw: the same seed, the same mutants")
    add("--jobs", type=int, default=1, help="copies of the code whose tests run side by side")
    add("--log", type=Path, help="add each result to this file; what it knows is not tried again")
    add("--keep", action="store_true", help="with --fixed and --log: write kill-rates.json")
    add("--minutes", type=float, default=1, help="leave out tests of a module that take longer")
    add("--least", type=float, default=0, help="fail if fewer per cent are killed")
    asked = parser.parse_args()
    if asked.fixed and asked.modules:
        parser.error("--fixed draws from all packages: name no modules")
    if asked.keep and not (asked.fixed and asked.log):
        parser.error("--keep needs --fixed and --log")
    return asked


def main() -> int:
    asked = _asked()
    if asked.fixed:
        names = [one.name for one in PACKAGE.iterdir() if one.is_dir() or one.suffix == ".py"]
        everything = list(found(sorted(names)))
        drawn = fixed_draw(everything, asked.seed)[: asked.sample]
    else:
        everything = list(found(asked.modules or MODULES))
        most = min(asked.sample or len(everything), len(everything))
        indices = random.Random(asked.seed).sample(range(len(everything)), most)
        drawn = [everything[index] for index in sorted(indices)]
    if os.geteuid() == 0:
        if asked.log:
            asked.log.touch()
            os.chown(asked.log, _NOBODY, _NOBODY)
        arguments = [one for one in sys.orig_argv[1:] if one != "--keep"]  # nobody may not write it
        status = subprocess.call([*_APART, sys.executable, *arguments])
    else:
        print(f"{len(drawn)} of {len(everything)} mutants", flush=True)
        status = _try(drawn, Log(asked.log), asked)
    log = Log(asked.log)
    if asked.keep and all(mutant in log.trials for mutant in drawn):
        _keep(drawn, log, asked.seed)
    return status


if __name__ == "__main__":
    sys.exit(main())
