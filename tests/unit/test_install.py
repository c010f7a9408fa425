"""The command that installs weighin: one line, from one place, also in the docs."""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from weighin import __version__, install

ROOT = Path(__file__).parents[2]
WHERE = ", where URL is the address of weighin's repository"


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
    assert install.command("hf") == f"pip install 'weighin[hf] @ git+URL'{WHERE}"
    assert install.command("hf", "ray") == f"pip install 'weighin[hf,ray] @ git+URL'{WHERE}"
    assert install.command() == f"pip install 'weighin @ git+URL'{WHERE}"
    assert install.upgrade() == f"pip install --upgrade 'weighin @ git+URL'{WHERE}"


def test_the_repository_of_the_metadata_is_named(installed: Path) -> None:
    with (installed / "METADATA").open("a") as file:
        file.write("Project-URL: Issues, https://a.b/issues\nProject-URL: Source, https://a.b/c\n")
    assert install.command("hf") == "pip install 'weighin[hf] @ git+https://a.b/c'"
    assert install.upgrade() == "pip install --upgrade 'weighin @ git+https://a.b/c'"


def test_the_clone_or_the_wheel_that_is_still_there_is_named(
    installed: Path, tmp_path: Path
) -> None:
    def came_from(place: Path, **details: object) -> None:
        found = json.dumps({"url": place.as_uri(), **details})
        (installed / "direct_url.json").write_text(found)

    clone, wheel = tmp_path / "my clone", tmp_path / "weighin-9.9-py3-none-any.whl"
    clone.mkdir()
    wheel.touch()
    came_from(clone, dir_info={"editable": True})
    assert install.command("hf") == f"pip install --editable '{clone}[hf]'"
    assert install.command("hf", anywhere=True) == f"pip install 'weighin[hf] @ git+URL'{WHERE}"
    came_from(clone, dir_info={})
    assert install.command("hf") == f"pip install '{clone}[hf]'"
    came_from(wheel, archive_info={})
    assert install.command("hf") == f"pip install '{wheel}[hf]'"
    wheel.unlink()
    assert install.command("hf") == f"pip install 'weighin[hf] @ git+URL'{WHERE}"


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
