"""Build wheels, and make environments for them that share the tests' torch."""

import os
import subprocess
import sys
import venv
from pathlib import Path


def build(source: Path, folder: Path) -> Path:
    """Build the wheel of the project ``source`` in the empty ``folder``, without downloads."""
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, *command, "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment(folder: Path, packages: Path, *, with_pip: bool = False) -> Path:
    """Return the interpreter of a new environment that also finds the packages in another folder."""
    venv.create(folder, with_pip=with_pip)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    (site / "zz_dependencies.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder``, where nothing of this checkout can be imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
