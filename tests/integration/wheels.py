"""Build wheels, and install them into environments that share the tests' torch."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def build(source: Path, folder: Path) -> Path:
    """Build the wheel of the project ``source`` in the empty ``folder``, without downloads."""
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, *command, "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(folder: Path, *wheels: Path) -> Path:
    """Return the interpreter of a new environment in ``folder`` that has these wheels.

    Torch and all other packages are those of the tests.
    """
    interpreter = empty(folder, Path(sysconfig.get_path("purelib")))
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", *wheels], check=True)
    return interpreter


def empty(folder: Path, packages: Path, *, with_pip: bool = False) -> Path:
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
