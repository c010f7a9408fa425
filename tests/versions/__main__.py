"""Run the tests of the loader, the formats, the strategies and the prediction on other versions.

    python3 tests/versions [--remove] [TORCH:PYTHON ...] [-- PYTEST ARGUMENTS]      (make test-versions)

Pairs come from the arguments, else from PAIRS, else they are ``oldest:3.11 newest:3.13``: the oldest
torch that pyproject.toml allows, and the newest that pip finds. Each gets an environment of its own in
``.venv-versions``, which is kept but for ``--remove``: the CUDA build of torch takes 6 GiB. Without a GPU, hand
pip the index of PyTorch's CPU wheels in PIP_ARGS. Ends with 1 where a test failed, or a pair could not be tried.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".venv-versions"
PAIRS: Final = "oldest:3.11 newest:3.13"
TESTED: Final = (
    "torch_files", "blocks", "skeleton", "cache", "contract", "convert",
    "hostile_files", "inspect",
    "formats", "generate", "measure", "models", "predict", "predict_allocators",
    "predict_figures", "registry", "safetensors_layout", "saving", "snippet",
    "load_streaming", "streaming_reads", "keys", "synthesised", "loaders",
    "verify", "pretrained", "kept_ties", "transformers_reader",
)  # fmt: skip
"""Unit tests of what runs torch: the loader, the formats, the strategies and the prediction. The loader's
conformance with torch is tested, too."""


_TOOLS: Final = ("pytest", "hypothesis")  # of the extra "dev": what these tests import
_TORCHS_OWN: Final = ("torch", "sympy")  # torch pins sympy exactly, each version another one


def main() -> int:
    """Try each pair, and return the exit status."""
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    pairs = [one for one in given[:at] if one != "--remove"]
    failed = []
    for pair in pairs or os.environ.get("PAIRS", "").split() or PAIRS.split():
        torch, _, python = pair.partition(":")
        folder = FOLDER / f"torch-{torch}-python-{python}"
        print(f"versions: torch {torch}, Python {python} in {folder}", flush=True)
        try:
            _install(torch, python, folder)
            _test(folder, given[at + 1 :])
        except (OSError, subprocess.SubprocessError) as error:
            failed.append(f"{pair}: {error}")
        if "--remove" in given[:at]:
            shutil.rmtree(folder, ignore_errors=True)
    print(*(f"versions: failed: {one}" for one in failed), sep="\n")
    return int(bool(failed))


def _install(torch: str, python: str, folder: Path) -> None:
    """Make the environment or bring it up to date; ready last, so that half of one is made anew."""
    ready = folder / "ready"
    if not ready.is_file():
        pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
        found = [*pyenv.glob(f"{python}*/bin/python"), f"python{python}"]
        subprocess.run([found[0], "-m", "venv", "--clear", folder], check=True)
    ready.unlink(missing_ok=True)
    if torch == "oldest":
        (torch,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    constraints = FOLDER / "constraints.txt"  # only torch is to differ
    constraints.write_text("".join(one for one in lines if one.split("==")[0] not in _TORCHS_OWN))
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    pip += shlex.split(os.environ.get("PIP_ARGS", ""))
    pip += ["--upgrade", "torch"] if torch == "newest" else [f"torch=={torch}"]
    pip += ["--constraint", constraints, "--editable", ROOT, *_TOOLS]
    subprocess.run(pip, check=True)
    ready.touch()


def _test(folder: Path, arguments: list[str]) -> None:
    files = [f"tests/unit/test_{name}.py" for name in TESTED]
    pytest = [folder / "bin/python", "-m", "pytest", "--quiet", "-p", "no:cacheprovider"]
    version = "import torch; print('versions: torch', torch.__version__)"
    subprocess.run([folder / "bin/python", "-c", version], check=True, cwd=FOLDER)
    command = [*pytest, *files, "tests/conformance", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, timeout=3600)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    sys.exit(main())
