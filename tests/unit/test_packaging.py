"""The sdist, and what a wheel of it says of itself; tests/integration/test_wheel.py installs one."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
BUILDERS = ("GITHUB_REPOSITORY", "GITHUB_SERVER_URL", "GITHUB_SHA", "WEIGHIN_REPOSITORY")
Build = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Build one target ("sdist" or "wheel") of a folder, with hatchling alone and no network."""

    def run(target: str, folder: Path = ROOT, **environment: str) -> Path:
        out = tmp_path / f"dist-{target}"
        inherited = {name: value for name, value in os.environ.items() if name not in BUILDERS}
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
        subprocess.run(
            command, cwd=folder, env=inherited | environment, check=True, capture_output=True
        )
        [built] = out.iterdir()
        return built

    return run


def unpacked(sdist: Path, folder: Path) -> Path:
    folder.mkdir()
    subprocess.run(["tar", "-xzf", sdist, "-C", folder], check=True)
    [root] = folder.iterdir()
    return root


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return BytesParser().parsebytes(archive.read(name))


def test_an_sdist_has_no_results_and_pypi_shows_whole_addresses(
    build: Build, tmp_path: Path
) -> None:
    environment = {"GITHUB_REPOSITORY": "me/mine", "GITHUB_SHA": "a" * 40}
    root = unpacked(build("sdist", **environment), tmp_path / "unpacked")
    assert {path.name for path in root.iterdir()} == {
        ".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "configs", "docker", "docs",
        "harness", "hatch_build.py", "pyproject.toml", "strategies",
    }  # fmt: skip
    assert not [path for path in root.rglob("*") if path.suffix in {".csv", ".jsonl", ".pyc"}]
    built = metadata(build("wheel", root))  # knows of no repository but by the sdist
    assert built.get_all("Project-URL") == [
        "Source, https://github.com/me/mine",
        "Documentation, https://github.com/me/mine/tree/HEAD/docs",
        "Changelog, https://github.com/me/mine/blob/HEAD/CHANGELOG.md",
        "Issues, https://github.com/me/mine/issues",
    ]
    payload = built.get_payload(decode=True)
    assert isinstance(payload, bytes)
    targets = re.findall(r"\]\(([^)\s]+)\)", payload.decode())
    ours = [target for target in targets if target.startswith("https://github.com/me/mine/")]
    files = {target for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
             if (ROOT / target.partition("#")[0]).exists()}  # fmt: skip
    view = {name: "raw" if name.endswith((".svg", ".png")) else "blob" for name in files}
    assert set(ours) == {
        f"https://github.com/me/mine/{view[name]}/{'a' * 40}/{name}" for name in files
    }
    assert not files & set(targets)
