"""How .venv is made: the lines that say what comes, where torch comes from, and pip's own words."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
specification = importlib.util.spec_from_file_location("set_up", ROOT / "harness/set_up.py")
assert specification
assert specification.loader
set_up = importlib.util.module_from_spec(specification)
specification.loader.exec_module(set_up)

INDEX = "https://download.pytorch.org/whl/cpu"
CUDA = "the CUDA build, about 2.6 GiB more to download and 4.5 GiB more on the disk"
AVOID = (
    "to avoid it, press Ctrl-C, and name a folder or an index that has torch's CPU build:"
    " PIP_FIND_LINKS=FOLDER or PIP_EXTRA_INDEX_URL=URL before the same command"
)


def own_settings(**variables: str) -> dict[str, str]:
    """Return an environment whose pip reads no settings but these."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return others | {"PIP_CONFIG_FILE": os.devnull} | variables


@pytest.fixture
def own_pip(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in os.environ:
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return monkeypatch


def test_the_first_line_says_what_comes_and_its_size_and_time() -> None:
    for text in (set_up.USE, set_up.DEV):
        assert re.search(r"about \d+ MiB to download, \d\.\d GiB on the disk$", text)


def test_without_a_gpu_and_without_settings_of_pip_the_cpu_build_is_asked_for() -> None:
    assert set_up.source(False, []) == (
        True,
        f"this machine has no GPU: torch's CPU build comes from {INDEX}",
    )


def test_the_settings_of_pip_win_and_the_gigabytes_are_named_before() -> None:
    assert set_up.source(False, ["find-links", "index-url"]) == (
        False,
        "torch comes from the places in pip's settings: find-links, index-url\n"
        f"if they have no CPU build, pip installs {CUDA}; {AVOID}",
    )


def test_with_a_gpu_the_cuda_build_is_installed() -> None:
    line = f"this machine has a GPU: pip installs {CUDA} of torch"
    assert set_up.source(True, []) == (False, line)


@pytest.mark.parametrize("device", ["nvidiactl", "dxg"])
def test_a_gpu_is_a_device_of_its_driver(device: str, tmp_path: Path) -> None:
    assert not set_up.gpu_is_here(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()
    assert set_up.gpu_is_here(tmp_path)


def test_settings_are_read_from_files_and_variables(
    own_pip: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert set_up.pip_settings(sys.executable) == []
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://a.b/simple\ntimeout = 5\n")
    own_pip.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    own_pip.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert set_up.pip_settings(sys.executable) == ["find-links", "index-url"]


def test_an_index_that_does_not_answer_is_said_with_the_gigabytes_that_follow(
    own_pip: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    own_pip.setattr(set_up, "CPU_INDEX", "http://127.0.0.1:9/cpu")
    set_up.install_cpu_build(sys.executable)
    assert capfd.readouterr().out == (
        f"http://127.0.0.1:9/cpu does not answer: pip installs {CUDA}\n{AVOID}\n"
    )


def test_the_cpu_build_of_the_pinned_version_is_installed_from_the_index(
    own_pip: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pin = next(line for line in lines if line.startswith("torch=="))
    write_index(tmp_path / "index", pin.removeprefix("torch=="))
    own_pip.setattr(set_up, "CPU_INDEX", (tmp_path / "index").as_uri())
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    set_up.install_cpu_build(python)
    freeze = subprocess.run(
        [python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    )
    assert freeze.stdout == f"{pin}+cpu\n"


def write_index(folder: Path, version: str) -> None:
    """Write an index that has an empty torch in two versions."""
    (folder / "torch").mkdir(parents=True)
    links = []
    for each in (version, "99.0"):
        name = f"torch-{each}+cpu-py3-none-any.whl"
        info = f"torch-{each}+cpu.dist-info"
        with ZipFile(folder / "torch" / name, "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {each}+cpu\n")  # fmt: skip
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")  # fmt: skip
            wheel.writestr(f"{info}/RECORD", "")
        links.append(f'<a href="{name}">{name}</a>')
    (folder / "torch/index.html").write_text("".join(links))


def test_pip_says_itself_why_it_could_not_install(tmp_path: Path) -> None:
    (tmp_path / "harness").mkdir()
    shutil.copy(ROOT / "harness/set_up.py", tmp_path / "harness")
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = subprocess.run(
        [sys.executable, tmp_path / "harness/set_up.py"],
        env=own_settings(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.startswith(f"installing what {set_up.USE}, 1 to 3 minutes\ntorch comes from")
    assert "No matching distribution found for hatchling" in done.stderr
    assert done.stderr.endswith(
        "error: pip could not install the packages; pip's output above has the reason\n"
        "if a download failed, run the same command again\n"
    )
