"""Create .venv, the environment of this folder's make targets, with the versions of constraints.txt.

    python3 harness/set_up.py          # what `make bench` and the other commands of weighin need
    python3 harness/set_up.py --dev    # adds what `make test`, `make lint` and `make docs` need

On a machine without a GPU, torch's CPU build comes from PyTorch's index, or from the places in pip's own
settings: pip's default index has only the much larger CUDA build.
"""

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


def create() -> None:
    """Create .venv with nothing but pip and, without a GPU, torch's CPU build."""
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
    # NVIDIA's driver is loaded, or WSL offers its GPU.
    if any(Path("/dev", name).exists() for name in ("nvidiactl", "nvidia0", "dxg")):
        print(f"this machine has a GPU: pip installs {CUDA} of torch", flush=True)
        return
    print(f"no GPU: torch's CPU build comes from {CPU_INDEX}; without it, {CUDA}", flush=True)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = next(line for line in lines if line.startswith("torch=="))
    # Of one version, pip prefers the build 2.13.0+cpu to 2.13.0, from whichever place.
    install("--no-deps", "--extra-index-url", CPU_INDEX, pinned)


def install(*arguments: str) -> None:
    pip = [FOLDER / "bin/python", "-m", "pip", "install"]
    if subprocess.run([*pip, *arguments], check=False).returncode:
        fail(
            "pip could not install the packages; pip's output above has the reason",
            "if a download failed, run the same command again",
        )


def fail(message: str, repair: str) -> NoReturn:
    print(f"error: {message}\n{repair}", file=sys.stderr)
    sys.exit(1)


def main() -> None:
    """Create .venv, or with --dev extend it."""
    is_dev = "--dev" in sys.argv[1:]
    print(f"installing what {DEV if is_dev else USE}, 1 to 3 minutes", flush=True)
    if not is_dev:
        create()
    constraints, extra = str(ROOT / "constraints.txt"), "dev" if is_dev else "hf"
    install("--constraint", constraints, "--editable", f"{ROOT}[{extra}]")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
