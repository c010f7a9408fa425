"""Try every layout with every verb, and write the page "What weighin reads": ``make checkpoints``.

Examples:
  python tests/checkpoints --out tests/checkpoints/layouts.md
  python tests/checkpoints --only "ten dtypes" --verbs inspect,convert
  python tests/checkpoints --out tests/checkpoints/layouts.md --tried tried.jsonl   # stopped: run it again
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple
from pathlib import Path
from queue import Queue

sys.path[:0] = [str(Path(__file__).parents[1])]

import page  # noqa: E402
from fork_server import ForkServer  # noqa: E402
from layouts import VERBS, Layout, every  # noqa: E402
from tried import IN_ZOO, Missing, Verdict, server, tried  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default="", help="layouts with this text in their name or their group")
    add("--verbs", type=lambda text: text.split(","), default=VERBS)
    add("--processes", type=int, default=2, help="how many layouts at once")
    add("--out", type=Path, help="write the page to this file")
    add(
        "--tried",
        type=Path,
        help="add each layout's verdicts to this file; what it has is not tried again",
    )
    options = parser.parse_args()
    chosen = [one for one in every() if options.only in f"{one.group} {one.name}"]
    found: dict[str, dict[str, Verdict]] = {}
    if options.tried and options.tried.exists():
        for name, words in map(json.loads, options.tried.read_text().splitlines()):
            found[name] = {verb: Verdict(*one) for verb, one in words.items()}
    for zoo in (False, True):
        left = [one for one in chosen if one.name not in found and (IN_ZOO in one.packages) is zoo]
        found |= _try_all(left, options, zoo) if left else {}
    answers = {one.name: found[one.name] for one in chosen if found[one.name]}
    wrong = sum(one.state == "WRONG" for each in answers.values() for one in each.values())
    missing = len(chosen) - len(answers)
    print(f"{len(answers)} layouts, {wrong} wrong answers, {missing} without their package")
    if options.out:
        options.out.write_text(page.text(chosen, answers))
    return int(bool(wrong or missing))


def _try_all(
    chosen: list[Layout], options: argparse.Namespace, zoo: bool
) -> dict[str, dict[str, Verdict]]:
    """Try layouts, some at once, and return the verdicts of each by its name."""
    free = Queue[ForkServer]()
    with ExitStack() as servers, ThreadPoolExecutor(options.processes) as pool:
        for _ in range(min(options.processes, len(chosen))):
            # A cache and a lock each: two runs of bench would wait for each other.
            cache = servers.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))
            free.put(servers.enter_context(server(cache, zoo=zoo)))
        found = pool.map(lambda one: _try(one, free, options), chosen)
        return {one.name: verdicts for one, verdicts in zip(chosen, found, strict=True)}


def _try(
    layout: Layout, free: Queue[ForkServer], options: argparse.Namespace
) -> dict[str, Verdict]:
    """Try a layout, print what came of it, and return the verdicts; none if a package is missing."""
    forks = free.get()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        try:
            found = tried(layout, Path(folder), forks, options.verbs)
        except Missing as error:
            print(f"{layout.name}: needs {error}", flush=True)
            return {}
        except subprocess.TimeoutExpired as error:
            wrong = Verdict("WRONG", f"took over {error.timeout} s")
            found = dict.fromkeys(options.verbs, wrong)
        finally:
            free.put(forks)
    lines = [f"{layout.name}: " + " ".join(f"{verb}:{one.state}" for verb, one in found.items())]
    lines += [f"    {verb}: {one.words}" for verb, one in found.items() if one.state == "WRONG"]
    print("\n".join(lines), flush=True)
    if options.tried:
        words = {verb: astuple(one) for verb, one in found.items()}
        with options.tried.open("a") as file:
            file.write(json.dumps([layout.name, words]) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
