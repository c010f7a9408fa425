"""``weighin cache``: deleting asks first; both verbs are data, too."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

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


def typed(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app.app, ["cache", "clear", *arguments])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("answer", "names_of", "question", "code", "said", "left"),
    [
        (True, [], "Delete 2 checkpoints (3.906 KiB)?", 0, "deleted 2 checkpoints, freed 3.906 KiB\n", []),
        (False, ["tied-tiny"], "Delete 1 checkpoint (1000 B)?", 1, "note: nothing was deleted\n", ALL),
    ],
    ids=["yes", "no"],
)  # fmt: skip
def test_on_a_terminal_the_answer_decides(
    answer: bool, names_of: list[str], question: str, code: int, said: str, left: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked: list[str] = []

    def confirm(text: str, **_: object) -> bool:
        asked.append(text)
        return answer

    monkeypatch.setattr(click, "confirm", confirm)
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    ended, text = typed(*names_of)
    assert (ended, asked) == (code, [question])
    assert text.endswith(said)
    assert names() == left


def test_where_nobody_can_answer_nothing_is_deleted() -> None:
    done = CliRunner().invoke(app.app, ["cache", "clear"])
    assert isinstance(done.exception, HarnessError) and done.exception.exit_code == 2
    assert str(done.exception) == (
        "2 checkpoints (3.906 KiB) would be deleted, but without a terminal weighin cannot ask you"
        " first\nto delete them without a question, add --yes"
    )
    assert names() == ALL


def test_yes_deletes_without_a_question_and_an_empty_cache_asks_nothing() -> None:
    assert typed("gpt2-tiny", "--yes") == (0, "deleted 1 checkpoint, freed 2.930 KiB\n")
    assert names() == ALL[1:]
    typed("-y")
    assert typed() == (0, "deleted 0 checkpoints, freed 0 B\n")
