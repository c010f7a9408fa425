"""``weighin cache``: deleting asks first; both verbs are data, too."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from test_cli_help import shown

from weighin.checkpoint import cache, staging
from weighin.cli import app
from weighin.errors import HarnessError


@pytest.fixture(autouse=True)
def _cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    for name, size in (("gpt2-tiny", 3000), ("tied-tiny", 1000)):
        folder = staging.folder() / "models" / f"{name}-0123abcd"
        (folder / "pt").mkdir(parents=True)
        (folder / "pt" / "model.pt").write_bytes(bytes(size))
        cache.write_marker(folder, "pt")


def names() -> list[str]:
    return sorted(stored["name"] for stored in cache.list_entries())


ALL = ["gpt2-tiny-0123abcd", "tied-tiny-0123abcd"]


def answered(answer: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    asked: list[str] = []

    def confirm(text: str, **_: object) -> bool:
        asked.append(text)
        return answer == "y"

    monkeypatch.setattr(click, "confirm", confirm)
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    result = CliRunner().invoke(app.app, ["cache", "clear", *arguments])
    return result.exit_code, "".join(asked) + "\n" + result.output


def test_a_confirmed_question_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = answered("y", monkeypatch=monkeypatch)
    assert code == 0
    assert text.startswith("Delete 2 checkpoints (3.906 KiB)?\n")
    assert text.endswith("deleted 2 checkpoints, freed 3.906 KiB\n")
    assert names() == []


def test_a_declined_question_deletes_nothing_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, text = answered("n", "tied-tiny", monkeypatch=monkeypatch)
    assert code == 1
    assert text.startswith("Delete 1 checkpoint (1000 B)?\n")
    assert text.endswith("note: nothing was deleted\n")
    assert names() == ALL


def test_where_nobody_can_answer_nothing_is_deleted() -> None:
    result = CliRunner().invoke(app.app, ["cache", "clear"])
    assert isinstance(result.exception, HarnessError)
    assert result.exception.exit_code == 2
    assert str(result.exception) == (
        "2 checkpoints (3.906 KiB) would be deleted, but without a terminal weighin cannot ask you"
        " first\nto delete them without a question, add --yes"
    )
    assert names() == ALL


def test_yes_deletes_without_a_question() -> None:
    code, text = shown("cache", "clear", "gpt2-tiny", "--yes")
    assert (code, text) == (0, "deleted 1 checkpoint, freed 2.930 KiB\n")
    assert names() == ALL[1:]


def test_an_empty_cache_asks_nothing() -> None:
    shown("cache", "clear", "-y")
    assert shown("cache", "clear") == (0, "deleted 0 checkpoints, freed 0 B\n")


def test_a_model_that_is_not_cached_is_named() -> None:
    result = CliRunner().invoke(app.app, ["cache", "clear", "gpt2-tinny", "--yes"])
    assert str(result.exception) == (
        "no cached model is called 'gpt2-tinny'\n"
        "did you mean 'gpt2-tiny'? known: gpt2-tiny, tied-tiny"
    )
