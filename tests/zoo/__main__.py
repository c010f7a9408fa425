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
from entries import Case
from running import Tried, run_apart
from table import bad, page, worst


def main() -> int:
    options = _parser().parse_args()
    chosen = _chosen(options.exactly)
    done = _resumed(options.keep) if options.keep else {}
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
    text = page(tried, _versions())
    print(text)
    if options.out:
        options.out.write_text(text)
    return int(bad(tried))


def _chosen(exactly: str) -> list[Case]:
    families = [entries.module_cases, entries.pair_cases]
    if find_spec("torchvision"):
        families.append(entries.vision_cases)
    found = [case for family in families for case in family()]
    labels = exactly.split(",")
    return [case for case in found if not exactly or case.label in labels]


def _resumed(keep: Path) -> dict[str, Tried]:
    found: dict[str, Tried] = {}
    if keep.exists():
        with keep.open("rb") as file:
            while file.peek(1):
                one: Tried = pickle.load(file)
                found[one.case.label] = one
    return found


def _versions() -> str:
    if find_spec("torchvision"):
        return f"torch {torch.__version__} and torchvision {version('torchvision')}"
    return f"torch {torch.__version__}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tests/zoo", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="write the page to this file")
    add("--exactly", default="", metavar="LABELS", help="the models with these labels, by commas")
    add("--quick", action="store_true", help="test strategies with three formats only")
    add("--keep", type=Path, help="append results to this file, and resume from it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
