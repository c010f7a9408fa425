"""Texts that must not change: compared with files, and written again by ``pytest --rewrite``.

    kept(Path(__file__).with_name("snapshots"))("verbs/list.txt", output)

A file may also have the questions: ``answered`` gives the text with their answers.

Read the difference before you commit files that ``--rewrite`` wrote.
"""

import difflib
from collections.abc import Callable
from pathlib import Path

Compare = Callable[[str, str], None]


def kept(folder: Path, rewrite: bool = False) -> Compare:
    """Return a function that fails if a text differs from its file in ``folder``."""

    def same(name: str, text: str) -> None:
        file = folder / name
        if rewrite:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            return
        assert file.exists(), f"no snapshot {name}: pytest --rewrite writes it"
        before = file.read_text()
        if text != before:
            lines = difflib.unified_diff(
                before.splitlines(), text.splitlines(), "before", "now", lineterm="", n=1
            )
            shown = "\n".join([*lines][:40])
            raise AssertionError(f"{name} changed (pytest --rewrite accepts it):\n{shown}")

    return same


def answered(file: Path, answer: Callable[[str], str]) -> str:
    """Return the text of a file of lines ``$ QUESTION``, each with its present answer below."""
    questions = [line for line in file.read_text().splitlines() if line.startswith("$ ")]
    assert questions, f"no line of {file.name} begins with '$ '"
    return "\n".join(f"{line}\n{answer(line[2:])}\n" for line in questions)
