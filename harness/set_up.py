"""Create .venv, the environment of this folder's make targets, with the versions of constraints.txt.

    python3 harness/set_up.py          # what `make bench` and the other commands of weighin need
    python3 harness/set_up.py --dev    # adds what `make test`, `make lint` and `make docs` need

On a machine without a GPU, torch comes from PyTorch's index of CPU builds, unless pip's settings name
other places for packages: pip's default index has only the much larger CUDA build.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NoReturn

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / ".venv"
CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
CUDA: Final = "the CUDA build, about 2.6 GiB more to download and 4.5 GiB more on the disk"
USE: Final = "weighin's commands need into .venv: about 280 MiB to download, 1.3 GiB on the disk"
DEV: Final = (
    "tests, checks and docs need into .venv: about 270 MiB to download, 1.0 GiB on the disk"
)
AVOID: Final = (
    "to avoid it, press Ctrl-C, and name a folder or an index that has torch's CPU build:"
    " PIP_FIND_LINKS=FOLDER or PIP_EXTRA_INDEX_URL=URL before the same command"
)


def source(gpu: bool, settings: list[str]) -> tuple[bool, str]:
    """Return whether to use PyTorch's index of CPU builds, and lines to print about torch's source."""
    if gpu:
        return False, f"this machine has a GPU: pip installs {CUDA} of torch"
    if settings:
        where = f"torch comes from the places in pip's settings: {', '.join(settings)}"
        return False, f"{where}\nif they have no CPU build, pip installs {CUDA}; {AVOID}"
    return True, f"this machine has no GPU: torch's CPU build comes from {CPU_INDEX}"


def gpu_is_here(root: Path = Path("/")) -> bool:
    """Return whether NVIDIA's driver is loaded, or whether WSL offers its GPU."""
    return any((root / path).exists() for path in ("dev/nvidiactl", "dev/nvidia0", "dev/dxg"))


def pip_settings(python: Path) -> list[str]:
    """Return the names of pip's settings that say from which places it gets packages."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True, check=True
    )
    places = r"^(?:global|install|:env:)\.(index-url|extra-index-url|find-links|no-index)="
    return sorted(set(re.findall(places, listed.stdout, re.MULTILINE)))


def install_cpu_build(python: Path) -> None:
    """Install torch's CPU build; if the index does not answer, say which build pip installs instead."""
    index = ["--index-url", CPU_INDEX]
    asked = subprocess.run(
        [python, "-m", "pip", "index", "versions", "torch", *index, "--retries=0", "--timeout=10"],
        capture_output=True,
        check=False,
    )
    if asked.returncode:
        print(f"{CPU_INDEX} does not answer: pip installs {CUDA}\n{AVOID}", flush=True)
        return
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = next(line for line in lines if line.startswith("torch=="))
    install(python, "--no-deps", *index, pinned)


def create() -> None:
    """Create .venv with nothing but pip."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this script also starts with an older Python)
        fail(
            f"weighin needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}",
            "name a newer one: PYTHON=python3.12 before the same command",
        )
    shutil.rmtree(FOLDER, ignore_errors=True)
    if subprocess.run([sys.executable, "-m", "venv", FOLDER], check=False).returncode:
        fail(
            f"{sys.executable} could not create an environment; the output above has the reason",
            "on Debian and Ubuntu: apt-get install python3-venv",
        )


def install(python: Path, *arguments: str) -> None:
    if subprocess.run([python, "-m", "pip", "install", *arguments], check=False).returncode:
        fail(
            "pip could not install the packages; pip's output above has the reason",
            "if a download failed, run the same command again",
        )


def fail(message: str, repair: str) -> NoReturn:
    print(f"error: {message}\n{repair}", file=sys.stderr)
    sys.exit(1)


def main() -> None:
    """Create .venv, or with --dev extend it."""
    is_dev, python = "--dev" in sys.argv[1:], FOLDER / "bin/python"
    print(f"installing what {DEV if is_dev else USE}, 1 to 3 minutes", flush=True)
    if not is_dev:
        create()
        ask, lines = source(gpu_is_here(), pip_settings(python))
        print(lines, flush=True)
        if ask:
            install_cpu_build(python)
    pinned = ("--constraint", str(ROOT / "constraints.txt"))
    install(python, *pinned, "--editable", f"{ROOT}[{'dev' if is_dev else 'hf'}]")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
