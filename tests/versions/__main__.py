"""Run the tests of the loader, the formats, the strategies and the prediction on other versions.

    python3 tests/versions [TORCH:PYTHON ...] [-- PYTEST ARGUMENTS]      (make test-versions)

Pairs come from the arguments, else from PAIRS, else they are ``oldest:3.11 newest:3.13``: the oldest
torch and transformers that pyproject.toml allows, and the newest that pip finds. Each gets an environment of its own in
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
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".venv-versions"
PAIRS: Final = "oldest:3.11 newest:3.13"
TESTED: Final = (
    "torch_files", "blocks", "skeleton", "cache", "checksum", "contract", "convert",
    "deferred", "dtypes", "hostile_files", "hostile_matrix", "inspect",
    "formats", "generate", "measure", "models", "predict", "predict_allocators",
    "predict_figures", "registry", "safetensors_layout", "saving", "snippet",
    "strategy_options", "load_streaming", "streaming_reads", "keys", "synthesised", "loaders",
    "verify", "pretrained", "kept_ties", "reading",
)  # fmt: skip
"""Unit tests of what runs torch: the loader, the formats, the strategies and the prediction. The loader's
conformance with torch is tested, too."""

_TOOLS: Final = ("pytest", "hypothesis")  # of the extra "dev": what these tests import
# What differs between pairs, and what each version of torch or transformers pins for itself.
_FREE: Final = ("torch", "sympy", "transformers", "tokenizers", "huggingface-hub", "safetensors")
COUNTS: Final = ("passed", "failed", "errors", "skipped")
_PROBE: Final = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
_MOST_S: Final = 3600
_ASK: Final = "import platform, torch; print(torch.__version__, platform.python_version())"


class Failed(Exception):
    """A pair could not be tried."""


def main() -> int:
    """Try each pair, print the table, and return the exit status."""
    options = _arguments()
    rows, is_good = [["torch", "python", *COUNTS, "seconds", ""]], True
    for pair in options.pairs:
        torch, _, python = pair.partition(":")
        try:
            row = _try(torch, python, options.arguments)
        except Failed as error:
            _say(str(error))
            row = [torch, python, *"0000", "0", str(error).partition("\n")[0]]
        if options.remove:
            shutil.rmtree(_environment(torch, python), ignore_errors=True)
        is_good &= int(row[2]) > 0 and row[3:5] == ["0", "0"] and not row[-1]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    return int(not is_good)


def _arguments() -> argparse.Namespace:
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pairs", nargs="*", metavar="TORCH:PYTHON")
    parser.add_argument("--remove", action="store_true", help="remove each environment at its end")
    options = parser.parse_args(given[:at])
    options.pairs = options.pairs or os.environ.get("PAIRS", "").split() or PAIRS.split()
    options.arguments = given[at + 1 :]
    for pair in options.pairs:
        if not re.fullmatch(r"(oldest|newest|\d[\w.+]*):\d+\.\d+", pair):
            parser.error(f"{pair!r} is no pair: write it as 2.6.0:3.11, oldest:3.11 or newest:3.13")
    return options


def _try(torch: str, python: str, arguments: list[str]) -> list[str]:
    """Install one pair, run the tests there, and return its row of the table."""
    began = time.monotonic()
    folder = _install(torch, _interpreter(python), _environment(torch, python))
    asked = [folder / "bin/python", "-c", _ASK]
    found = subprocess.run(asked, capture_output=True, text=True, check=False, cwd=FOLDER)
    if found.returncode:
        raise Failed(f"torch cannot be imported: {found.stderr.strip().rpartition(chr(10))[2]}")
    _say(f"{found.stdout.strip()}: installed in {time.monotonic() - began:.0f} s")
    return [*found.stdout.split(), *_test(folder, arguments)]


def _interpreter(version: str) -> Path:
    """Return the first Python of ``version`` ("3.13") that starts and can make environments."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [Path(folder, f"python{version}") for folder in os.get_exec_path()]
    found += [home / "bin" / "python" for home in sorted(pyenv.glob(f"versions/{version}*"))]
    tried = ""
    for path in dict.fromkeys([*found, Path(sys.executable)]):
        if os.access(path, os.X_OK):
            done = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, check=False)
            if done.stdout.strip() == version:
                return path
            # Such as pyenv's shims of versions that are not chosen.
            error = done.stderr.strip().rpartition("\n")[2] or f"ends with {done.returncode}"
            tried += (
                f"\n  {path}: {error if done.returncode else f'is Python {done.stdout.strip()}'}"
            )
    raise Failed(
        f"no Python {version} here: looked in PATH and among pyenv's versions{tried}\n"
        f"  install one: pyenv install {version}, or the packages python{version} and python{version}-venv"
    )


def _environment(torch: str, python: str) -> Path:
    return FOLDER / f"torch-{torch}-python-{python}"


def _install(torch: str, interpreter: Path, folder: Path) -> Path:
    """Make the environment or bring it up to date; ready last, so that half of one is made anew."""
    ready = folder / "ready"
    if not ready.is_file():
        _call([interpreter, "-m", "venv", "--clear", folder], "making the environment failed")
    ready.unlink(missing_ok=True)
    what = [f"torch=={torch}", "transformers"]
    if torch in ("oldest", "newest"):
        names = ("torch", "transformers")
        what = (
            ["--upgrade", *names]
            if torch == "newest"
            else [f"{one}=={_oldest(one)}" for one in names]
        )
    _say(f"installing {' '.join(what)} with {interpreter} in {folder.relative_to(ROOT)}")
    pip = [folder / "bin/python", *["-m", "pip", "install", "--quiet", "--no-cache-dir"]]
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    tools = ["--constraint", _constraints(), "--editable", f"{ROOT}[hf]", *_TOOLS]
    _call([*pip, *extra, *what, *tools], f"pip could not install {' '.join(what)}")
    ready.touch()
    return folder


def _oldest(package: str) -> str:
    """Return the oldest version of a package that the project promises to work with."""
    found = re.search(rf'"{package}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    if not found:
        raise Failed(f"pyproject.toml names no oldest {package}")
    return found[1]


def _constraints() -> Path:
    """Write the versions that the project is tested with, without those that are to differ."""
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    path = FOLDER / "constraints.txt"
    path.write_text("".join(one for one in lines if one.partition("==")[0] not in _FREE))
    return path


def _call(command: Sequence[str | Path], failure: str) -> None:
    if status := subprocess.run(command, check=False, cwd=ROOT).returncode:
        raise Failed(f"{failure}: see above (status {status})")


def _test(folder: Path, arguments: list[str]) -> list[str]:
    """Return how many tests passed, failed, had an error and were skipped, the seconds, and what else failed."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    files = [f"tests/unit/test_{name}.py" for name in TESTED]
    pytest = [folder / "bin/python", *["-m", "pytest", "--quiet", "-p", "no:cacheprovider"]]
    command = [*pytest, f"--junit-xml={report}", *files, "tests/conformance", *arguments]
    began = time.monotonic()
    try:
        status = subprocess.run(command, check=False, cwd=ROOT, timeout=_MOST_S).returncode
        why = "" if status in (0, 1) else f"pytest ended with {status}"
    except subprocess.TimeoutExpired:
        why = f"not done after {_MOST_S} s"
    counts = [0, 0, 0]
    passed = 0
    if report.is_file():
        suite = ElementTree.parse(report).getroot()[0].attrib
        counts = [int(suite[name]) for name in ("failures", "errors", "skipped")]
        passed = int(suite["tests"]) - sum(counts)
    return [*map(str, (passed, *counts)), f"{time.monotonic() - began:.0f}", why]


def _say(text: str) -> None:
    print(f"versions: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    sys.exit(main())
