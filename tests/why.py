"""Ask weighin why each dying script died, and where, under five limits and without one.

    python tests/why.py --out FOLDER     # run what FOLDER does not have yet, and print the table
    python tests/why.py --write          # and write it to tests/commands/dying/README.md

An answer is right if it names a right cause and a right line, and "none" if it leaves one of them
out; without a right cause ("none" in the script's mark), the line alone is right. The limits are
shares of what the script needs, so that it dies at each of its stages. Runs are kept in FOLDER:
with the same folder, the rules of today explain the runs of before. It needs cgroups, and takes 5 to
25 minutes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cells import MIB, Outcome, Result, explained, new_group
from command_trees import seen_from_inside, variables, weighing
from dying_commands import DYING, Cause, Dying, empty, write

ROOT = Path(__file__).parents[1]
SHARES = (0.4, 0.55, 0.7, 0.85, 0.95)
"""The limits, as shares of what a script needs."""
TABLE = ROOT / "tests" / "commands" / "dying" / "README.md"


class Answer(NamedTuple):
    """What weighin says of a run, and whether it is right, wrong, or none."""

    verdict: str
    cause: str
    places: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        said = f"{self.cause or '-'}, {' '.join(self.places) or '-'}"
        return said if self.verdict == "right" else f"**{self.verdict}**: {said}"


def run(case: Dying, inputs: Mapping[str, Path], folder: Path) -> tuple[Path, Result]:
    """Run a script under its limit with weighin; return the run's folder and its record."""
    case.prepare(inputs)
    out = folder / "run"
    ram = ("--ram", str(case.limit_bytes)) if case.limit_bytes and not case.around_bytes else ()
    own = (*ram, "--cold", str(inputs["file"])) if case.cold else ram
    command = (*weighing(out, *own, "--timeout", "90"), *case.command(inputs))
    with new_group() if case.around_bytes else nullcontext() as group:
        if case.around_bytes and group:
            group.limit(case.around_bytes)
            command = (*seen_from_inside(group.path, folder), *command)
        process = subprocess.run(
            command,
            cwd=folder,
            env=variables(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    empty(inputs)
    assert (out / "records.jsonl").exists(), process.stderr
    result, _, _ = explained(out)
    assert process.returncode == result.exit_code
    return out, result


def read(case: Dying, folder: Path) -> Answer:
    """Return what weighin says of a run, judged by the marks in the script."""
    _, cause, text = explained(folder)
    name = cause or ""
    places = tuple(dict.fromkeys(re.findall(r"[\w/]+\.py:\d+", text)))
    known = {line.place: line.causes for line in case.marked()}
    if not set(places) <= known.keys():
        return Answer("wrong", name, places, text)
    right = {name for place in places for name in known[place]}
    if case.cause in (Cause.OUTER_LIMIT, Cause.PAGE_CACHE):
        right.add(case.cause)
    is_right = name in right and (places or not known) if name else Cause.NONE in right
    is_wrong = name and not (right or {*case.all_causes()}) & {name}
    return Answer("wrong" if is_wrong else "right" if is_right else "none", name, places, text)


def answers(case: Dying, inputs: Mapping[str, Path], folder: Path) -> Iterator[tuple[str, Answer]]:
    """Run a script without a limit and at each share of its need; return the answer for each."""
    need_bytes = 0
    for share in (None, *SHARES):
        here = folder / f"{Path(case.script).stem}-{share or 'free'}"
        tightest = int(need_bytes * share) // MIB * MIB if share else 0
        around = case.around_bytes and tightest
        under = replace(case, limit_bytes=0 if around else tightest, around_bytes=around or None)
        if (out := here / "run").exists():
            result, _, _ = explained(out)
        else:
            here.mkdir()
            out, result = run(under, inputs, here)
        assert result.ran
        if share is None:
            need_bytes = result.ran.needed_bytes or 0 if case.dies else case.limit_bytes
        place = f"{tightest // MIB} MiB" if share else "no limit"
        died = "" if result.outcome is Outcome.OK else " (died)"
        yield place + died, read(case, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--texts", action="store_true", help="print what weighin says")
    chosen = parser.parse_args()
    out = chosen.out or Path(tempfile.mkdtemp(prefix="weighin-why-", dir=ROOT))
    (files := out / "inputs").mkdir(parents=True, exist_ok=True)
    shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="weighin-test-"))
    inputs = write(files, shm)
    lines = ["| script | limit | cause and line |", "|---|---|---|"]
    verdicts = []
    print(*lines, sep="\n")
    for case in DYING:
        if not re.search(chosen.only, case.script):
            continue
        for place, said in answers(case, inputs, out):
            lines.append(f"| {case.script} | {place} | {said} |")
            verdicts.append(said.verdict)
            print(lines[-1], flush=True)
            if chosen.texts or said.verdict == "wrong":
                print(said.text)
    shm.rmdir()
    counts = {each: verdicts.count(each) for each in ("right", "none", "wrong")}
    total = f"{counts['right']} of {len(verdicts)} right, {counts['none']} none, {counts['wrong']} wrong."
    print(total)
    if chosen.write:
        head = "# What weighin says of these scripts\n\nWritten by `python tests/why.py --write`."
        TABLE.write_text("\n".join([head, "", total, "", *lines, ""]))


if __name__ == "__main__":
    main()
