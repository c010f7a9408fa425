"""What ``kill -9`` of a run of a command leaves, and who removes it."""

import signal
from pathlib import Path

import leftovers
import pytest
from typed import CommandLine, Started


@pytest.mark.parametrize(
    "remover",
    [
        ("run", "--out", "next", "--", "true"),
        pytest.param(("doctor",), marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
    ids=["the next run", "doctor"],
)
def test_the_folder_of_a_killed_run_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remover: tuple[str, ...]
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    weighin = CommandLine(tmp_path, tmp_path / "cache")

    def start(out: str) -> tuple[Started, Path]:
        before = set(temporary.iterdir())
        run = ("run", "--isolation", "process", "--no-stacks", "--out", out)
        started = weighin.start(*run, "--", "sh", "-c", f"touch {out}.on; exec sleep 300")
        leftovers.wait_until((tmp_path / f"{out}.on").exists, "the command did not start")
        (folder,) = set(temporary.iterdir()) - before
        return started, folder

    running, kept = start("running")
    killed, gone = start("killed")
    killed.end(signal.SIGKILL)
    ended = weighin.run(*remover)
    assert list(temporary.iterdir()) == [kept]
    assert ended.code == 0
    assert remover[0] == "run" or f"removed:folder{gone}" in "".join(ended.out.split())
    assert running.end(signal.SIGTERM).left == []
    assert list(temporary.iterdir()) == []
