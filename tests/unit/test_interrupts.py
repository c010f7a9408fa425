"""A stop raises once, never where something would be left half done, and is never lost."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes import DONE, JOB, PlayedIsolation, measure

from weighin import child_process
from weighin.errors import Interrupted
from weighin.run import interrupts


def stop(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_is_one_error_that_says_what_is_left(number: int) -> None:
    with pytest.raises(Interrupted) as caught, interrupts.stoppable():
        stop(number)
    assert (str(caught.value), caught.value.exit_code) == ("stopped; nothing is left running", 130)


def test_a_stop_is_taken_again_after_results_were_complete() -> None:
    interrupts.ignore()
    with pytest.raises(Interrupted), interrupts.stoppable():
        stop()


def test_a_second_stop_does_not_break_the_cleaning_up() -> None:
    cleaned = False
    with pytest.raises(Interrupted), interrupts.stoppable():
        try:
            stop()
        finally:
            stop()
            stop(signal.SIGTERM)
            cleaned = True
    assert cleaned


def test_a_stop_waits_for_what_must_not_be_half_done() -> None:
    done = []
    with pytest.raises(Interrupted), interrupts.stoppable(), interrupts.put_off():
        stop()
        done.append("started")
        with interrupts.put_off():
            done.append("recorded")
        done.append("removed")
    assert done == ["started", "recorded", "removed"]


def test_a_stop_is_taken_at_once_while_nothing_is_done_but_waiting() -> None:
    done = []
    with pytest.raises(Interrupted), interrupts.stoppable(), interrupts.put_off():
        try:
            with interrupts.allowed():
                stop()
                done.append("waited")
        finally:
            done.append("removed")
    assert done == ["removed"]


def test_a_stop_that_came_before_the_waiting_is_not_slept_through() -> None:
    with pytest.raises(Interrupted), interrupts.stoppable(), interrupts.put_off():
        stop()
        with interrupts.allowed():
            pytest.fail("waited")


def test_an_error_on_its_way_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="first"), interrupts.stoppable(), interrupts.put_off():
        stop()
        raise ValueError("first")


def test_a_stop_that_was_swallowed_is_raised_again() -> None:
    with pytest.raises(Interrupted), interrupts.stoppable():
        with suppress(Interrupted):  # as a destructor swallows what is raised in it
            stop()
        interrupts.check()


def test_the_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interrupts.stoppable():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    interrupts.check()


def test_a_hang_up_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.stoppable():
            stop(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_in_a_command_stops_as_a_run_and_the_command_cleans_up_in_peace() -> None:
    with pytest.raises(Interrupted), interrupts.stoppable(interrupts.EndedBySignal):
        try:
            with interrupts.stoppable():
                stop()
        finally:
            stop(signal.SIGHUP)
    with pytest.raises(interrupts.EndedBySignal), interrupts.stoppable(interrupts.EndedBySignal):
        with interrupts.stoppable():
            pass
        stop(signal.SIGTERM)


@pytest.mark.parametrize("step", ["start", "run", "close"])
def test_a_cell_that_is_stopped_is_closed_to_the_end(step: str, tmp_path: Path) -> None:
    done: list[str] = []

    class Isolation(PlayedIsolation):
        def start(self, *arguments: Any) -> Any:
            if step == "start":
                stop()
            done.append("started")
            running = super().start(*arguments)
            running.close = self.close
            return running

        def close(self) -> None:
            if step == "close":
                stop()
            done.append("closed")

    script: list[Any] = [*DONE[:3], stop, *DONE[3:]] if step == "run" else [*DONE]
    with pytest.raises(Interrupted), interrupts.stoppable():
        measure(Isolation(script), tmp_path, JOB, [], None)
    assert done == ["started", "closed"]


def test_a_stop_inside_an_exec_still_gives_the_exit_code(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from weighin.run import interrupts
try:
    with interrupts.stoppable(interrupts.EndedBySignal):
        exec("os.kill(os.getpid(), signal.SIGHUP)")
except interrupts.EndedBySignal:
    sys.exit(130)
"""
    (tmp_path / "stopping.py").write_text(code)
    variables = child_process.environment([str(tmp_path)])
    with child_process.Child(child_process.module("stopping"), variables) as child:
        assert child.wait(60) == 130
