"""A fork of a warm process is to its parent what a process of its own is."""

import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import leftovers
import pytest
from warm_children import Forks

from weighin import child_process

PROBE = """
import os, sys, time
from weighin.child_process import Parent
parent = Parent()
asked = parent.receive()
told = {"pid": os.getpid(), "argv": sys.argv[1:], "folder": os.getcwd(), "set": os.environ.get("OF_THIS_TEST")}
parent.send("told", warm="colorsys" in sys.modules, **told)
print("noise", file=sys.stderr, flush=True)
if asked["end"] == "waits":
    time.sleep(600)
if asked["end"] == "raises":
    raise ValueError("no such end")
if asked["end"] < 0:
    os.kill(os.getpid(), -asked["end"])
sys.exit(asked["end"])
"""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    (folder := tmp_path_factory.mktemp("modules")).joinpath("probe.py").write_text(PROBE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with closing(Forks("probe", preloaded=("colorsys",))) as started:
            yield started


def start(forks: Forks, end: object, *arguments: str) -> child_process.Child:
    child = child_process.Child(
        forks.command("probe", *arguments), child_process.environment() | {"OF_THIS_TEST": "a\nb"}
    )
    child.send("asked", end=end)
    return child


@pytest.mark.parametrize("end", [0, 3, "raises", -signal.SIGKILL, -signal.SIGTERM])
def test_streams_arguments_variables_folder_and_end_are_its_own(
    forks: Forks, end: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with start(forks, end, "one", "two words") as child:
        told = child.receive(60) or {}
        assert (told["warm"], told["argv"]) == (True, ["one", "two words"])
        assert (told["folder"], told["set"]) == (str(tmp_path), "a\nb")
        assert child.receive(60) is None
        assert child.wait(60) == (1 if end == "raises" else end)
        assert child.printed.startswith(b"noise\n")
        assert child.printed.endswith(b"ValueError: no such end\n") == (end == "raises")


def test_a_killed_child_takes_its_fork_with_it(forks: Forks) -> None:
    with start(forks, "waits") as child:
        fork = (child.receive(60) or {})["pid"]
        assert fork != child.pid
        assert leftovers.lives(fork)
    leftovers.wait_until(lambda: not leftovers.lives(fork), "the fork lives")


def test_other_modules_and_other_settings_start_cold(
    forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forks.command("other") == (sys.executable, "-P", "-m", "other")
    monkeypatch.setenv("HF_HUB_CACHE", "/elsewhere")
    assert forks.command("probe") == (sys.executable, "-P", "-m", "probe")
