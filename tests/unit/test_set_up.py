"""How .venv is made: what is said of it, where torch comes from, and pip's own words."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
specification = importlib.util.spec_from_file_location("set_up", ROOT / "harness/set_up.py")
assert specification
assert specification.loader
set_up = importlib.util.module_from_spec(specification)
specification.loader.exec_module(set_up)


@pytest.fixture
def own_pip(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in os.environ:
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return monkeypatch


def test_the_cpu_build_of_the_pinned_version_is_preferred_to_that_of_pips_own_index(
    own_pip: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pin = next(line for line in lines if line.startswith("torch=="))
    version = pin.removeprefix("torch==")
    write_index(tmp_path / "cpu", f"{version}+cpu", "99.0+cpu")
    write_index(tmp_path / "usual", version, "99.0")
    own_pip.setenv("PIP_INDEX_URL", (tmp_path / "usual").as_uri())
    own_pip.setattr(set_up, "FOLDER", tmp_path / "venv")
    own_pip.setattr(set_up, "gpu_is_here", lambda: False)
    own_pip.setattr(set_up, "CPU_INDEX", (tmp_path / "cpu").as_uri())
    set_up.create()
    assert f"no GPU: torch's CPU build comes from {set_up.CPU_INDEX}" in capfd.readouterr().out
    freeze = [str(tmp_path / "venv/bin/python"), "-m", "pip", "freeze"]
    done = subprocess.run(freeze, capture_output=True, text=True, check=True)
    assert done.stdout == f"{pin}+cpu\n"


def write_index(folder: Path, *versions: str) -> None:
    """Write an index that has an empty torch in some versions."""
    (folder / "torch").mkdir(parents=True)
    links = []
    for version in versions:
        name, info = f"torch-{version}-py3-none-any.whl", f"torch-{version}.dist-info"
        with ZipFile(folder / "torch" / name, "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")  # fmt: skip
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")  # fmt: skip
            wheel.writestr(f"{info}/RECORD", "")
        links.append(f'<a href="{name}">{name}</a>')
    (folder / "torch/index.html").write_text("".join(links))


def test_pip_says_itself_why_it_could_not_install(
    own_pip: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own_pip.setenv("PIP_NO_INDEX", "1")
    own_pip.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "harness").mkdir()
    for name in ("harness/set_up.py", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, str(tmp_path / "harness/set_up.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith(f"installing what {set_up.USE}, 1 to 3 minutes\n")
    assert "No matching distribution found for" in done.stderr
    assert done.stderr.endswith(
        "error: pip could not install the packages; pip's output above has the reason\n"
        "if a download failed, run the same command again\n"
    )
