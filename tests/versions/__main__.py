"""Run the tests of the loader, the formats, the strategies and the prediction on other versions.

    python3 tests/versions [TORCH:PYTHON ...] [-- PYTEST ARGUMENTS]      (make test-versions)

Pairs come from the arguments, else from PAIRS, else they are ``oldest:3.11 newest:3.13``: the oldest
torch that pyproject.toml allows, and the newest that pip finds. Each gets an environment of its own in
``.venv-versions``, which is kept: the CUDA build of torch takes 6 GiB. Without a GPU, hand pip the index
of PyTorch's CPU wheels in PIP_ARGS. Ends with 1 where a test failed, or a pair could not be tried.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import interpreters

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".venv-versions"
PAIRS: Final = "oldest:3.11 newest:3.13"
TESTED: Final = (
    "torch_files", "blocks", "skeleton", "cache", "checkpoint_files", "checksum", "contract", "convert",
    "converting_views", "deferred", "dtypes", "hostile_files", "hostile_matrix", "inspect",
    "formats", "generate", "measure", "models", "predict", "predict_allocator",
    "predict_heap", "predict_tables", "registry", "safetensors_layout", "saving", "snippet",
    "strategy_options", "load_streaming", "streaming_reads", "selection", "synthesised", "loaders",
    "verify",
)  # fmt: skip
"""Unit tests of what runs torch: the loader, the formats, the strategies and the prediction. The loader's
conformance with torch is tested, too."""

_TOOLS: Final = ("pytest", "hypothesis")  # of the extra "dev": what these tests import
_TORCHS_OWN: Final = ("torch", "sympy")  # torch pins sympy exactly, each version another one
_COLUMNS: Final = ("torch", "python", "passed", "failed", "errors", "skipped", "seconds", "")
_MOST_S: Final = 3600
_ASK: Final = "import platform, torch; print(torch.__version__, platform.python_version())"


class Failed(Exception):
    """A pair could not be tried."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one pair gave."""

    torch: str
    python: str
    passed: int = 0
    failed: int = 0
    errors: int = 0
    skipped: int = 0
    seconds: float = 0.0
    why: str = ""

    @property
    def is_good(self) -> bool:
        return bool(self.passed) and not (self.failed or self.errors or self.why)

    def cells(self) -> list[str]:
        counts = [str(n) for n in (self.passed, self.failed, self.errors, self.skipped)]
        return [self.torch, self.python, *counts, f"{self.seconds:.0f}", self.why]


def main() -> int:
    """Try each pair, print the table, and return the exit status."""
    options = _arguments()
    rows = []
    for pair in options.pairs:
        torch, _, python = pair.partition(":")
        try:
            row = _try(torch, python, options.arguments)
        except (Failed, interpreters.NotFound) as error:
            _say(str(error))
            row = Row(torch, python, why=str(error).partition("\n")[0])
        if options.remove:
            shutil.rmtree(_environment(torch, python), ignore_errors=True)
        rows.append(row)
    _print_table(rows)
    return 0 if all(row.is_good for row in rows) else 1


def _arguments() -> argparse.Namespace:
    before, _, after = " ".join(map(shlex.quote, sys.argv[1:])).partition(" -- ")
    parser = argparse.ArgumentParser(
        prog="tests/versions", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("pairs", nargs="*", metavar="TORCH:PYTHON")
    parser.add_argument(
        "--remove", action="store_true", help="remove each environment after its tests"
    )
    options = parser.parse_args(shlex.split(before))
    options.pairs = options.pairs or os.environ.get("PAIRS", "").split() or PAIRS.split()
    options.arguments = shlex.split(after)
    for pair in options.pairs:
        if not re.fullmatch(r"(oldest|newest|\d[\w.+]*):\d+\.\d+", pair):
            parser.error(f"{pair!r} is no pair: write it as 2.6.0:3.11, oldest:3.11 or newest:3.13")
    return options


def _try(torch: str, python: str, arguments: list[str]) -> Row:
    """Install one pair and run the tests there."""
    began = time.monotonic()
    folder = _install(torch, interpreters.find(python), _environment(torch, python))
    found = subprocess.run(
        [folder / "bin/python", "-c", _ASK], capture_output=True, text=True, check=False, cwd=FOLDER
    )
    if found.returncode:
        raise Failed(f"torch cannot be imported: {found.stderr.strip().rpartition(chr(10))[2]}")
    torch, python = found.stdout.split()
    _say(f"torch {torch}, Python {python}: installed in {time.monotonic() - began:.0f} s")
    return _test(folder, torch, python, arguments)


def _environment(torch: str, python: str) -> Path:
    return FOLDER / f"torch-{torch}-python-{python}"


def _install(torch: str, interpreter: Path, folder: Path) -> Path:
    """Make the environment or bring it up to date; ready last, so that half of one is made anew."""
    ready = folder / "ready"
    if not ready.is_file():
        _call([interpreter, "-m", "venv", "--clear", folder], "making the environment failed")
    ready.unlink(missing_ok=True)
    if torch == "oldest":
        torch = _oldest()
    what = ["--upgrade", "torch"] if torch == "newest" else [f"torch=={torch}"]
    _say(f"installing {what[-1]} with {interpreter} in {folder.relative_to(ROOT)}")
    pip: list[str | Path] = [
        folder / "bin/python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-cache-dir",
    ]
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    tools: list[str | Path] = ["--constraint", _constraints(), "--editable", ROOT, *_TOOLS]
    _call([*pip, *extra, *what, *tools], f"pip could not install {what[-1]}")
    ready.touch()
    return folder


def _oldest() -> str:
    """Return the oldest torch that the project promises to work with."""
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    if not found:
        raise Failed("pyproject.toml names no oldest torch")
    return found[1]


def _constraints() -> Path:
    """Write the versions that the project is tested with, without torch's: only torch is to differ."""
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    path = FOLDER / "constraints.txt"
    path.write_text("".join(one for one in lines if one.partition("==")[0] not in _TORCHS_OWN))
    return path


def _call(command: list[str | Path], failure: str) -> None:
    if status := subprocess.run(command, check=False, cwd=ROOT).returncode:
        raise Failed(f"{failure}: see above (status {status})")


def _test(folder: Path, torch: str, python: str, arguments: list[str]) -> Row:
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command: list[str | Path] = [
        folder / "bin/python", "-m", "pytest", "--quiet", "-p", "no:cacheprovider",
        f"--junit-xml={report}", *(f"tests/unit/test_{name}.py" for name in TESTED), "tests/conformance", *arguments,
    ]  # fmt: skip
    began = time.monotonic()
    why = ""
    try:
        status = subprocess.run(command, check=False, cwd=ROOT, timeout=_MOST_S).returncode
        why = "" if status in (0, 1) else f"pytest ended with {status}"
    except subprocess.TimeoutExpired:
        why = f"not done after {_MOST_S} s"
    seconds = time.monotonic() - began
    counts = _counts(report) if report.is_file() else (0, 0, 0, 0)
    return Row(torch, python, *counts, seconds=seconds, why=why)


def _counts(report: Path) -> tuple[int, int, int, int]:
    """Return how many tests passed, failed, had an error and were skipped."""
    suite = ElementTree.parse(report).getroot()[0].attrib
    failed, errors, skipped = (int(suite[name]) for name in ("failures", "errors", "skipped"))
    return int(suite["tests"]) - failed - errors - skipped, failed, errors, skipped


def _print_table(rows: list[Row]) -> None:
    table = [list(_COLUMNS), *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print()
    for line in table:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


def _say(text: str) -> None:
    print(f"versions: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    sys.exit(main())
