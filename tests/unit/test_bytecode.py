"""Workers find bytecode of all that they import."""

from importlib.util import cache_from_source
from pathlib import Path

import pytest

import weighin
from weighin.run import loads


def test_the_package_and_its_strategies_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, strategies = tmp_path / "package", tmp_path / "strategies"
    sources = [package / "__init__.py", package / "worker" / "body.py", strategies / "own.py"]
    for source in sources:
        source.parent.mkdir(parents=True, exist_ok=True)
        source.touch()
    monkeypatch.setattr(weighin, "__file__", str(sources[0]))
    monkeypatch.setattr(loads, "data_folder", lambda _name: strategies)
    loads.compile_code()
    assert [path for path in sources if not Path(cache_from_source(str(path))).is_file()] == []


def test_code_that_cannot_be_compiled_is_left_to_whoever_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("def")
    monkeypatch.setattr(weighin, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(loads, "data_folder", lambda _name: tmp_path)
    loads.compile_code()
    assert capfd.readouterr() == ("", "")
