"""A container's image gets the packages that a checkpoint needs, also when its run is resumed."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from weighin.isolation import select
from weighin.plan.start import resume, start
from weighin.settings.reading import check_suite

pytest.importorskip("gguf", reason="pip install gguf")
pytest.importorskip("accelerate", reason="pip install accelerate")


def test_a_container_gets_the_packages_that_a_gguf_file_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "checkpoints"), *sys.path])
    import_module("gguf_files")._folder("Q8_0", tie_word_embeddings=True)(tmp_path)
    suite = {"models": str(tmp_path), "strategies": "streaming", "isolation": "process"}
    chosen: list[tuple[str, ...]] = []

    choose, named = select.choose, select.named

    def choosing(*words: str, packages: tuple[str, ...] = (), **options: Any) -> Any:
        chosen.append(packages)
        return choose(*words, packages=packages, **options)

    with monkeypatch.context() as patch:
        patch.setattr(select, "choose", choosing)
        start(check_suite(suite), tmp_path / "run")

    def recorded(*words: Any) -> Any:
        chosen.append(words[2])
        return named(*words)

    monkeypatch.setattr(select, "named", recorded)
    resume(tmp_path / "run", trusted=True)
    assert [{"gguf", "accelerate", "transformers"} - {*one} for one in chosen] == [set(), set()]
