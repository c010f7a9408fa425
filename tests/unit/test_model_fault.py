"""A forward pass that fails after any load: how that is found out, and what the record then says."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_result
from scripts import JOB

from weighin import child_process
from weighin.formats.selection import WHOLE, Selection
from weighin.result import Outcome
from weighin.run.model_fault import blamed, failure, is_right_load

FAILED = replace(make_result(), outcome=Outcome.STRATEGY_FAILED, last_phase="forward", message="x")


@pytest.mark.parametrize(
    ("changes", "is_right"),
    [
        ({}, True),
        ({"outcome": Outcome.WRONG_WEIGHTS}, True),
        ({"outcome": Outcome.OOM_KILLED}, False),
        ({"outcome": Outcome.OK}, False),
        ({"ready_ns": None}, False),
        ({"last_phase": "touch"}, False),
        ({"last_phase": None}, False),
    ],
)
def test_only_a_forward_pass_that_failed_after_a_whole_load_may_be_the_models_fault(
    changes: dict[str, object], is_right: bool
) -> None:
    assert is_right_load(replace(FAILED, **changes)) == is_right  # type: ignore[arg-type]


def asked(code: str, monkeypatch: pytest.MonkeyPatch, selection: Selection = WHOLE) -> str | None:
    """Run this code in place of the process that loads the model again."""
    monkeypatch.setattr(child_process, "module", lambda _: (sys.executable, "-P", "-c", code))
    return failure(replace(JOB, timeout_s=60.0), Path("/w.pt"), selection)


ANSWERS = """
import json, sys
job, question = sys.stdin.readline(), json.loads(sys.stdin.readline())
text = json.dumps([json.loads(job)["checkpoint"], question["checkpoint"], question["selection"]["key"]])
print(json.dumps({"event": "answer", "failure": text}))
"""


def test_the_reference_load_tells_how_the_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(ANSWERS, monkeypatch, Selection("model")) == '["/c", "/w.pt", "model"]'


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os.kill(os.getpid(), 11)", "it ends with SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", None),  # perhaps by the kernel, for lack of memory
        ("raise SystemExit(3)", None),
    ],
)
def test_a_process_that_dies_tells_by_which_signal(
    monkeypatch: pytest.MonkeyPatch, code: str, how: str | None
) -> None:
    assert asked(code, monkeypatch) == how


def test_a_process_that_takes_too_long_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time; time.sleep(60)"
    monkeypatch.setattr(child_process, "module", lambda _: (sys.executable, "-P", "-c", code))
    assert failure(replace(JOB, timeout_s=0.2), Path("/w.pt"), WHOLE) is None


def test_a_blamed_load_is_ok_with_a_warning() -> None:
    found = blamed(replace(FAILED, warnings=("before",)), "it ends with SIGSEGV")
    assert (found.outcome, found.message, found.last_phase) == (Outcome.OK, "", None)
    assert found.warnings == (
        "before",
        "the forward pass of gpt2-xl fails, also after a load without the strategy: it ends with"
        " SIGSEGV. Every weight is right. To measure the load alone: --use none",
    )
