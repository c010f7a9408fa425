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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
    parser.add_argument("--only", help="layouts with this text in their name or their group")
    parser.add_argument("--verbs", default=",".join(VERBS))
    parser.add_argument("--processes", type=int, default=2, help="how many layouts at once")
    parser.add_argument("--out", type=Path, help="write the page to this file")
    parser.add_argument(
        "--tried",
        type=Path,
        help="add the verdicts of each layout to this file, and do not try again what it has",
    )
    options = parser.parse_args()
    chosen = [one for one in every() if (options.only or "") in f"{one.group} {one.name}"]
    verbs = options.verbs.split(",")
    found = _kept(options.tried)
    for zoo in (False, True):
        members = [
            one for one in chosen if (IN_ZOO in one.packages) is zoo and one.name not in found
        ]
        found |= _try_all(members, verbs, min(options.processes, len(members)), zoo, options.tried)
    answers = {one.name: found[one.name] for one in chosen if found[one.name]}
    wrong = sum(one.state == "WRONG" for each in answers.values() for one in each.values())
    missing = len(chosen) - len(answers)
    print(f"{len(answers)} layouts, {wrong} wrong answers, {missing} without their package")
    if options.out:
        options.out.write_text(page.text(chosen, answers))
    return int(bool(wrong or missing))


def _kept(path: Path | None) -> dict[str, dict[str, Verdict]]:
    """Return the verdicts of a run that was stopped, by the name of their layout."""
    if path is None or not path.exists():
        return {}
    lines = map(json.loads, path.read_text().splitlines())
    return {
        name: {verb: Verdict(*one) for verb, one in verdicts.items()} for name, verdicts in lines
    }


def _try_all(
    chosen: list[Layout], verbs: list[str], processes: int, zoo: bool, kept: Path | None
) -> dict[str, dict[str, Verdict]]:
    """Try layouts, some at once, and return the verdicts of each by its name."""
    if not chosen:
        return {}
    with ExitStack() as servers, ThreadPoolExecutor(processes) as pool:

        def start() -> ForkServer:
            # A cache and a lock each: two runs of bench would wait for each other.
            cache = servers.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))
            return servers.enter_context(server(cache, zoo=zoo))

        free: Queue[ForkServer] = Queue()
        for _ in range(processes):
            free.put(start())
        found = pool.map(lambda one: _try(one, free, start, verbs, kept), chosen)
        return {one.name: verdicts for one, verdicts in zip(chosen, found, strict=True)}


def _try(
    layout: Layout,
    free: Queue[ForkServer],
    start: Callable[[], ForkServer],
    verbs: list[str],
    kept: Path | None,
) -> dict[str, Verdict]:
    """Try a layout, print what came of it, and return the verdicts; none if a package is missing.

    A command that takes too long ends the process in whose fork it runs: ``start`` starts another.
    """
    forks = free.get()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        try:
            found = tried(layout, Path(folder), forks, verbs)
        except Missing as error:
            print(f"{layout.name}: needs {error}", flush=True)
            return {}
        except subprocess.TimeoutExpired as error:
            forks = start()
            found = dict.fromkeys(verbs, Verdict("WRONG", f"took over {error.timeout} s"))
        finally:
            free.put(forks)
    lines = [f"{layout.name}: " + " ".join(f"{verb}:{one.state}" for verb, one in found.items())]
    lines += [f"    {verb}: {one.words}" for verb, one in found.items() if one.state == "WRONG"]
    print("\n".join(lines), flush=True)
    if kept:
        words = {verb: [one.state, one.words] for verb, one in found.items()}
        with kept.open("a") as file:
            file.write(json.dumps([layout.name, words]) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
