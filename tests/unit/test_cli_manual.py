"""The manual page: as the verbs are now, and readable by man."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli_help import VERBS

from pages.manual import manual
from weighin import errors
from weighin.cli._verb import Verb, summary

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "weighin.1"


def test_the_committed_page_is_that_of_these_verbs() -> None:
    assert PAGE.read_text() == manual(), "write it again: make man"


def test_every_verb_example_and_exit_code_is_in_it() -> None:
    text = manual().replace("\\-", "-")
    for words, verb in VERBS.items():
        assert isinstance(verb, Verb)
        assert f'.SS "weighin {" ".join(words)} ' in text
        assert f"\n{summary(verb)}\n" in text
        assert all(f"\n{example}\n" in text for example in verb.examples.values())
    assert all(f"\\fB{code}\\fR\n" in text for code in errors.MEANINGS)


WRITE_AND_ASK = """
from click.testing import CliRunner
from weighin.cli.app import app
from pages.manual import manual
manual()
for words in (["-h"], ["bench", "-h"], ["cache", "list", "-h"]):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
"""


def test_the_verbs_take_h_after_the_page_is_written_in_the_same_process() -> None:
    command = [sys.executable, "-c", WRITE_AND_ASK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_groff_reads_it_without_a_warning() -> None:
    if not shutil.which("groff"):
        pytest.skip("no groff here: apt-get install groff-base")
    command = ["groff", "-man", "-Tutf8", "-ww", str(PAGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
