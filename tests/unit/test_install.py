"""How weighin is installed: the command in its texts, its environment, its pins, and what PyPI gets.

tests/fresh sets it up as a user does, tests/integration installs its wheel.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from email.parser import BytesParser
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from nightly import nightly
from packaging.specifiers import SpecifierSet

from weighin import __version__, install

ROOT = Path(__file__).parents[2]
WHERE = ", where URL is the address of weighin's repository"
PLACEHOLDER = f"pip install 'weighin[hf] @ git+URL'{WHERE}"
PYTHONS = ("3.11.0", "3.11.2", "3.12.0", "3.13.0")  # 3.11.2 is Debian 12's


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the metadata folder of a weighin that stands before all others on the path."""
    folder = tmp_path / "site/weighin-9.9.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: weighin\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(folder.parent)
    assert metadata.version("weighin") == "9.9"
    return folder


@pytest.mark.usefixtures("installed")
def test_where_nothing_names_a_repository_a_placeholder_is_said_to_be_one() -> None:
    assert install.command("hf") == PLACEHOLDER
    assert install.command("hf", "ray") == f"pip install 'weighin[hf,ray] @ git+URL'{WHERE}"
    assert install.command() == f"pip install 'weighin @ git+URL'{WHERE}"
    assert install.upgrade() == f"pip install --upgrade 'weighin @ git+URL'{WHERE}"


def test_the_repository_of_the_metadata_is_named(installed: Path) -> None:
    with (installed / "METADATA").open("a") as file:
        file.write("Project-URL: Issues, https://a.b/issues\nProject-URL: Source, https://a.b/c\n")
    assert install.command("hf") == "pip install 'weighin[hf] @ git+https://a.b/c'"
    assert install.upgrade() == "pip install --upgrade 'weighin @ git+https://a.b/c'"


@pytest.mark.parametrize(
    ("name", "details", "said"),
    [
        ("my clone", {"dir_info": {"editable": True}}, "pip install --editable '{}[hf]'"),
        ("my clone", {"dir_info": {}}, "pip install '{}[hf]'"),
        ("mine.whl", {"archive_info": {}}, "pip install '{}[hf]'"),
        ("gone.whl", {"archive_info": {}}, PLACEHOLDER),
    ],
    ids=["editable", "a clone", "a wheel", "a wheel that is gone"],
)
def test_the_clone_or_the_wheel_that_is_still_there_is_named(
    installed: Path, tmp_path: Path, name: str, details: dict[str, object], said: str
) -> None:
    (tmp_path / "my clone").mkdir()
    (tmp_path / "mine.whl").touch()
    place = tmp_path / name
    (installed / "direct_url.json").write_text(json.dumps({"url": place.as_uri(), **details}))
    assert install.command("hf") == said.format(place)
    assert install.command("hf", anywhere=True) == PLACEHOLDER


def test_the_pages_install_with_this_line() -> None:
    assert f"`git+URL`{WHERE}" in " ".join((ROOT / "README.md").read_text().split())
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    text = "\n".join(page.read_text() for page in pages)
    lines = re.findall(r"pip install (?:-\S+ )*[^\s`#]*weighin[^`#\n]*", text)
    assert lines
    for line in lines:
        extras = re.search(r"\[([\w,-]+)\]", line)
        whole = install.command(*(extras[1].split(",") if extras else []), anywhere=True)
        wheel = f"'./weighin-{__version__}-py3-none-any.whl{extras[0] if extras else ''}'"
        assert line.strip() in {whole.removesuffix(WHERE), f"pip install {wheel}"}, line


# -- .venv


def test_pip_says_itself_why_it_could_not_install(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    variables |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }
    (tmp_path / "harness").mkdir()
    for name in ("harness/set_up.py", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, str(tmp_path / "harness/set_up.py")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    size = r"about \d+ MiB to download, \d\.\d GiB on the disk"
    assert re.match(rf"installing what .* {size}, 1 to 3 minutes\n", done.stdout)
    assert "No matching distribution found for" in done.stderr
    assert done.stderr.endswith(
        "error: pip could not install the packages; pip's output above has the reason\n"
        "if a download failed, run the same command again\n"
    )


# -- constraints.txt: versions that every Python can install that requires-python promises


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def installed_pin(name: str, version: str) -> metadata.Distribution | None:
    """Return the package in this environment, if it is there in the version of the pin."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return found if found.version.partition("+")[0] == version else None


def offered(name: str, python: str) -> list[str]:
    """Return the versions of a package for which the index has a wheel for this Python."""
    asked = [sys.executable, "-m", "pip", "index", "versions", name, "--only-binary=:all:"]
    answer = subprocess.check_output([*asked, f"--python-version={python}"], text=True)
    (line,) = [line for line in answer.splitlines() if line.startswith("Available")]
    return [version.partition("+")[0] for version in line.split(": ")[1].split(", ")]


def test_an_installed_pin_supports_every_promised_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {kind.rpartition(" ")[2] for kind in project["classifiers"] if ":: 3." in kind}
    assert {python.rpartition(".")[0] for python in PYTHONS} == named
    found = [each for pin in pins().items() if (each := installed_pin(*pin))]
    needs = {each.name: (each.metadata.get_all("Requires-Python") or [""])[0] for each in found}
    needs["weighin"] = project["requires-python"]
    assert len(needs) > 60
    for name, wanted in needs.items():
        assert [one for one in PYTHONS if one not in SpecifierSet(wanted)] == [], name


@pytest.mark.index
@pytest.mark.slow
@pytest.mark.parametrize("python", nightly(*PYTHONS))  # by day, `make setup` asks for one of them
def test_the_index_has_every_other_pin_for_every_python(python: str) -> None:
    asked = [pin for pin in pins().items() if pin[0].startswith("torch") or not installed_pin(*pin)]
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda pin: offered(pin[0], python), asked)
    assert [pin for pin, there in zip(asked, answers, strict=True) if pin[1] not in there] == []


# -- the sdist


BUILDERS = ("GITHUB_REPOSITORY", "GITHUB_SERVER_URL", "GITHUB_SHA", "WEIGHIN_REPOSITORY")


def metadata_of(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return BytesParser().parsebytes(archive.read(name))


def test_an_sdist_has_no_results_and_pypi_shows_whole_addresses(tmp_path: Path) -> None:
    def build(target: str, folder: Path, **environment: str) -> Path:
        """Build with hatchling alone and no network."""
        out = tmp_path / f"dist-{target}"
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
        variables = {name: value for name, value in os.environ.items() if name not in BUILDERS}
        subprocess.check_output(
            command, cwd=folder, env=variables | environment, stderr=subprocess.PIPE
        )
        (built,) = out.iterdir()
        return built

    environment = {"GITHUB_REPOSITORY": "me/mine", "GITHUB_SHA": "a" * 40}
    (folder := tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "-xzf", build("sdist", ROOT, **environment), "-C", folder], check=True)
    (root,) = folder.iterdir()
    assert {path.name for path in root.iterdir()} == {
        ".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "configs", "docker", "docs",
        "harness", "hatch_build.py", "pyproject.toml", "strategies",
    }  # fmt: skip
    assert not [path for path in root.rglob("*") if path.suffix in {".csv", ".jsonl", ".pyc"}]
    built = metadata_of(build("wheel", root))  # knows of no repository but by the sdist
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
