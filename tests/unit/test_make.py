"""The Makefile: which environment a target needs, and words that are no target."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USE = ("bench", "floor", "peers", "report", "check", "recommend", "doctor")
ALONE = ("help", "clean", "test-versions", "test-all")  # test-all begins with test


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """Ask make what it would do."""
    return subprocess.run(
        ["make", "--dry-run", "--always-make", *words],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},  # `make test` exports its own settings
        capture_output=True,
        text=True,
        check=False,
    )


def targets() -> list[str]:
    return re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("target", targets())
def test_the_commands_for_use_install_no_tools_of_developers(target: str) -> None:
    lines = [line for line in make(target).stdout.splitlines() if "harness/set_up.py" in line]
    plain = ["python3 harness/set_up.py"]
    if target in USE:
        assert lines == plain
    elif target not in ALONE:
        assert lines == [*plain, f"{plain[0]} --dev"]


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("bench gpt2-tiny RAM=1g", "make bench MODEL=gpt2-tiny RAM=1g"),
        ("floor weights.pt", "make floor MODEL=weights.pt"),
        ("gpt2-tiny", "make bench MODEL=gpt2-tiny"),
        ("recommend README.md MODEL=other", "make recommend MODEL=README.md"),
    ],
)
def test_a_model_that_is_given_as_a_target_is_refused_with_the_right_spelling(
    words: str, right: str
) -> None:
    done = make(*words.split())
    name = right.partition("MODEL=")[2].partition(" ")[0]
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"Makefile:\d+: \*\*\* no target is called {re.escape(name)};"
        rf" to load a model of that name: {re.escape(right)}\.  Stop\.\n",
        done.stderr,
    )
