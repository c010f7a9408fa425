"""The built wheel in a fresh environment: one import name, which harms no project's own packages."""

import json
import zipfile
from pathlib import Path

import pytest
from wheels import install, run

ROOT = Path(__file__).resolve().parents[2]
THEIR_PACKAGES = ("harness", "strategies", "docker", "tests", "configs")


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel; torch and others are those of the tests."""
    return install(tmp_path_factory.mktemp("environment"), wheel)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose packages have the names of this project's folders."""
    for name in THEIR_PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"OWNER = 'their {name}'\n")
    imports = "\n".join(f"import {name}" for name in THEIR_PACKAGES if name != "tests")
    checks = "\n".join(
        f"    assert {name}.OWNER == 'their {name}'" for name in THEIR_PACKAGES if name != "tests"
    )
    (tmp_path / "tests" / "test_theirs.py").write_text(
        f"{imports}\n\n\ndef test_theirs():\n{checks}\n"
        "\n\ndef test_with_ours(weighin):\n    assert weighin.measure\n"
    )
    return tmp_path


def test_the_wheel_brings_one_import_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    files = [name for name in names if ".data/data/share/man/" not in name]  # no import finds these
    tops = {name.partition("/")[0] for name in files}
    others = (".dist-info", ".data")  # nothing that can be imported
    assert {name for name in tops if not name.endswith(others)} == {"weighin"}


@pytest.mark.parametrize("how", [["-m", "pytest"], ["-c", "import pytest; pytest.console_main()"]])
def test_a_project_with_packages_of_the_same_names_runs_its_tests(
    python: Path, project: Path, how: list[str]
) -> None:
    done = run([str(python), *how, "-q", "-p", "no:cacheprovider"], project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_load_streaming_is_there_and_harness_is_not(python: Path, tmp_path: Path) -> None:
    code = "import weighin; print(weighin.load_streaming.__name__, weighin.__file__)"
    done = run([str(python), "-c", code], tmp_path)
    assert done.stdout.startswith("load_streaming "), done.stderr
    assert str(python.parents[1]) in done.stdout  # the wheel's, not this checkout's
    gone = run([str(python), "-c", "import harness"], tmp_path)
    assert "No module named 'harness'" in gone.stderr


def test_strategies_models_and_suites_are_in_the_wheel(python: Path, tmp_path: Path) -> None:
    done = run([str(python), "-m", "weighin", "list"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "streaming" in done.stdout and "gpt2-xl" in done.stdout


def test_a_suite_of_the_wheel_is_found_by_its_name(python: Path, tmp_path: Path) -> None:
    weighin = [str(python), "-m", "weighin"]
    listed = run([*weighin, "list", "suites", "--json", "-"], tmp_path)
    paths = {one["name"]: one["path"] for one in json.loads(listed.stdout)["suites"]}
    assert Path(paths["ci"]).is_relative_to(python.parents[1])
    ended = run([*weighin, "bench", "--suite", "ci", "--out", "/proc/run"], tmp_path)
    assert ended.returncode == 2
    assert "error: cannot write /proc/run/plan.json" in ended.stderr  # so the suite was read


def test_the_wheel_brings_the_manual_page(python: Path) -> None:
    page = python.parents[1] / "share" / "man" / "man1" / "weighin.1"
    assert page.read_text() == (ROOT / "docs" / "weighin.1").read_text()
