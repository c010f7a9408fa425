"""Test the loader and every strategy with models of torch and torchvision: ``python tests/zoo --help``."""

import argparse
import pickle
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

import entries
import torch
from running import kept, run_apart
from table import bad, page, worst


def main() -> int:
    options = _asked()
    has_vision = bool(find_spec("torchvision"))
    families = [entries.module_cases, entries.pair_cases]
    families += [entries.vision_cases] if has_vision else []
    labels = options.exactly.split(",")
    cases = [case for family in families for case in family()]
    chosen = [case for case in cases if not options.exactly or case.label in labels]
    done = kept(options.keep) if options.keep else {}
    tried = [done[case.label] for case in chosen if case.label in done]
    left = [case for case in chosen if case.label not in done]
    started = time.monotonic()
    for number, one in enumerate(run_apart(left, quick=options.quick), 1):
        tried.append(one)
        if options.keep:
            with options.keep.open("ab") as file:
                pickle.dump(one, file)
        print(
            f"[{number}/{len(left)} {time.monotonic() - started:.0f} s] {one.case.label}: "
            f"{worst(one.loads)}, {worst(one.judged)} ({one.seconds:.1f} s)",
            flush=True,
        )
    vision = f" and torchvision {version('torchvision')}" if has_vision else ""
    text = page(tried, f"torch {torch.__version__}{vision}")
    print(text)
    if options.out:
        options.out.write_text(text)
    return int(bad(tried))


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/zoo", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="write the page to this file")
    add("--exactly", default="", metavar="LABELS", help="the models with these labels, by commas")
    add("--quick", action="store_true", help="test strategies with three formats only")
    add("--keep", type=Path, help="append results to this file, and resume from it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
