"""Which Python interpreters this machine has that can make a virtual environment."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_PROBE = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"


class NotFound(Exception):
    """No interpreter of that version works; says where one was looked for."""


def find(version: str) -> Path:
    """Return the first interpreter of ``version`` ("3.13") that starts and can make environments.

    Raises:
        NotFound: there is none.
    """
    refused = []
    for path in dict.fromkeys(_candidates(version)):
        if not os.access(path, os.X_OK):
            continue
        why = _refusal(path, version)
        if not why:
            return path
        refused.append(f"{path}: {why}")
    tried = "".join(f"\n  {one}" for one in refused)
    raise NotFound(
        f"no Python {version} here: looked in PATH and among pyenv's versions{tried}\n"
        f"  install one: pyenv install {version}, or the packages python{version} and "
        f"python{version}-venv"
    )


def _candidates(version: str) -> Iterator[Path]:
    for folder in os.get_exec_path():
        yield Path(folder, f"python{version}")
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for home in sorted(root.glob(f"versions/{version}*")):
        yield home / "bin" / "python"
    yield Path(sys.executable)


def _refusal(path: Path, version: str) -> str:
    """Return why an interpreter is of no use, or nothing."""
    try:
        done = subprocess.run(
            [path, "-c", _PROBE], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:  # such as pyenv's shims of versions that are not chosen
        return done.stderr.strip().rpartition("\n")[2] or f"ends with {done.returncode}"
    return "" if done.stdout.strip() == version else f"is Python {done.stdout.strip()}"
