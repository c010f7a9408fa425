"""``weighin doctor``: its table, and its exit code where nothing enforces a limit."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_cli_help import shown
from typed_verbs import EXAMINATION, prepare

from weighin import doctor


@pytest.fixture(autouse=True)
def _prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)


def test_each_line_says_yes_partly_or_no() -> None:
    code, text = shown("doctor", columns=110)
    assert code == 0
    assert [line.rstrip() for line in text.splitlines()] == [
        "",
        " subject                            works   detail",
        f" {'─' * 108}",
        " isolation docker                   no      no Docker engine answers at unix:///var/run/docker.sock. start",
        "                                            one",
        " isolation cgroup enforces a limit  yes     a probe was killed, cgroup peak 384.000 MiB",
        " soft limit (ram_high)              partly  cgroup v1 has no memory.high",
        "",
    ]


def test_without_a_limit_that_holds_it_exits_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = replace(EXAMINATION, capabilities=EXAMINATION.capabilities[:1])
    monkeypatch.setattr(doctor, "examine", lambda: unlimited)
    assert shown("doctor")[0] == 3
