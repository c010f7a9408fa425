"""Test the loader and every strategy with models of torch and torchvision: ``python tests/zoo --help``."""

import argparse
import fnmatch
import pickle
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

import entries
import torch
from entries import Case
from running import Tried, run_apart
from table import bad, page, worst

FAMILIES = {
    "module_db": entries.module_cases,
    "pair": entries.pair_cases,
    "torchvision": entries.vision_cases,
}


def main() -> int:
    options = _parser().parse_args()
    chosen = _chosen(options)
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


def _chosen(options: argparse.Namespace) -> list[Case]:
    names = options.models.split(",") if options.models else list(FAMILIES)
    found = [case for name in names for case in FAMILIES[name]()]
    if options.exactly:
        names = options.exactly.split(",")
        found = [case for case in found if case.label in names]
    if options.only:
        found = [case for case in found if fnmatch.fnmatchcase(case.label, options.only)]
    if options.sample:
        found = found[:: max(1, len(found) // options.sample)][: options.sample]
    return found


def _resumed(keep: Path) -> dict[str, Tried]:
    found: dict[str, Tried] = {}
    if keep.exists():
        with keep.open("rb") as file:
            while file.peek(1):
                one: Tried = pickle.load(file)
                found[one.case.label] = one
    return found


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        return f"torch {torch.__version__} and torchvision {version('torchvision')}"
    return f"torch {torch.__version__}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tests/zoo", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the page to this file")
    parser.add_argument(
        "--only", metavar="PATTERN", help="models whose label matches, such as 'nn.LSTM*'"
    )
    parser.add_argument(
        "--exactly", metavar="LABELS", help="the models with these labels, by commas"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="about N models, spread over all")
    parser.add_argument("--models", help=f"comma-separated names of {','.join(FAMILIES)}")
    parser.add_argument(
        "--quick", action="store_true", help="test strategies with three formats only"
    )
    parser.add_argument("--keep", type=Path, help="append results to this file, and resume from it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
