"""The words at the end of a command's run: exact texts for each way to end."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_result
from ran_commands import PID, made, process, samples_of, stack

from weighin.records.explanation import answer, explain
from weighin.result import Kill, Mark, OpenFile, Outcome, Peaks
from weighin.units import GIB, MIB


def killed(**changes: Any) -> Any:
    """A command that its own limit of 600 MiB killed."""
    base = made(
        Outcome.OOM_KILLED,
        limit=600 * MIB,
        needed=598 * MIB,
        peaks=Peaks(cgroup_bytes=600 * MIB, file_sampled_bytes=0),
        kills=(Kill(PID, "python", is_main=True),),
        processes=(process(anon=597 * MIB),),
        survived=False,
    )
    return replace(base, **changes)


@pytest.mark.parametrize(
    "message",
    [
        "killed by SIGKILL, not for lack of memory: 400 MiB of its limit were never used, so"
        " another process sent SIGKILL",
        "ended by SIGTERM",
        "exit code 3",
        "still running after 10 s",
    ],
)
def test_other_ends_are_said_as_they_were_judged(message: str) -> None:
    outcome = Outcome.TIMEOUT if "running" in message else Outcome.COMMAND_FAILED
    (line,) = explain(made(outcome, message=message))
    assert line == message[0].upper() + message[1:] + "."


def test_a_command_that_lived_says_its_need_apart_from_its_page_cache() -> None:
    weights = OpenFile("/data/weights.pt", 300 * MIB, 300 * MIB)
    result = made(
        limit=4 * GIB,
        needed=531 * MIB,
        peaks=Peaks(cgroup_bytes=914 * MIB, file_sampled_bytes=383 * MIB),
        processes=(process(anon=531 * MIB, files=(weights,)),),
        cold=("/data/weights.pt",),
    )
    assert explain(result) == [
        "The command ended well under its limit of 4.00 GiB.",
        "The command needs at least 531 MiB of anonymous memory; the peak with page cache is 914 MiB."
        " Page cache: at most 383 MiB; /data/weights.pt cold at the start.",
    ]
    assert result.ran
    warm = replace(result, ran=replace(result.ran, cold=()))
    assert explain(warm)[1].endswith(
        " Page cache: at most 383 MiB; pages that other programs had read before are not charged"
        " (--cold PATH drops such pages)."
    )


def test_a_file_whose_page_cache_others_have_is_charged_to_nobody() -> None:
    weights = OpenFile("/data/weights.pt", 300 * MIB, 300 * MIB)
    result = made(
        needed=531 * MIB,
        peaks=Peaks(cgroup_bytes=531 * MIB, file_sampled_bytes=0),
        processes=(process(anon=531 * MIB, files=(weights,)),),
    )
    assert explain(result)[1].endswith(
        " Page cache: none; pages that other programs had read before are not charged (--cold PATH drops such pages)."
    )


def test_a_peak_at_the_limit_is_that_with_page_cache() -> None:
    result = made(
        limit=300 * MIB,
        needed=12 * MIB,
        needed_is_sampled=False,
        peaks=Peaks(cgroup_bytes=300 * MIB),
        processes=(process(anon=12 * MIB),),
    )
    assert explain(result)[1] == (
        "The command needs 12 MiB of anonymous memory; the peak with page cache is 300 MiB."
    )


def test_without_a_cgroup_the_need_is_sampled() -> None:
    result = made(needed=20 * MIB, processes=(process(anon=10 * MIB, shmem=10 * MIB),))
    assert explain(result) == [
        "The command ended well.",
        "The command needs at least 20 MiB of anonymous and shared memory (10 MiB and 10 MiB).",
    ]


def test_the_line_is_the_programs_own_and_names_the_function_that_it_called() -> None:
    frames = (
        "_load_from_state_dict (/v/lib/python3.11/site-packages/torch/nn/modules/module.py:2430)",
        "load_state_dict (/v/lib/python3.11/site-packages/torch/nn/modules/module.py:2600)",
        "<module> (/home/me/script.py:14)",
    )
    result = killed()
    ran = replace(result.ran, stacks=(stack(590 * MIB, *frames),))
    assert explain(replace(result, ran=ran))[1].endswith(
        " Most of this memory was in use when `load_state_dict` (script.py:14) ran."
    )


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        (("A.f.<locals>.<lambda> (/s.py:9)", "<module> (/s.py:20)"), "`A.f` (s.py:9)"),
        (("<module> (/s.py:9)",), "s.py:9"),
        (("load (/usr/lib/python3/dist-packages/vllm/a.py:3)",), "`load` (vllm/a.py:3)"),
        (("<module> (/app/tool/__main__.py:3)",), "tool/__main__.py:3"),
    ],
)  # fmt: skip
def test_how_a_line_is_named(frames: tuple[str, ...], words: str) -> None:
    result = killed()
    ran = replace(result.ran, stacks=(stack(590 * MIB, *frames),))
    assert (
        f" Most of this memory was in use when {words} ran." in explain(replace(result, ran=ran))[1]
    )


def test_a_thread_that_waits_is_not_where_the_memory_went() -> None:
    result = killed()
    stacks = (
        stack(590 * MIB, "wait (/usr/lib/python3.11/threading.py:320)", "<module> (/s.py:9)"),
        replace(stack(590 * MIB, "work (/s.py:4)"), thread="worker"),
    )
    library = stack(590 * MIB, "copy (/v/lib/python3.11/site-packages/x.py:3)")
    for seen in (stacks, (library, *stacks)):
        ran = replace(result.ran, stacks=seen)
        assert "`work` (s.py:4)" in explain(replace(result, ran=ran))[1]


def test_a_librarys_hook_after_the_end_is_not_where_the_memory_went() -> None:
    result = killed()
    hook = "_exit_function (/usr/lib/python3.11/multiprocessing/util.py:360)"
    frames = ("free (/v/lib/python3.11/site-packages/x.py:3)", hook)
    stacks = (stack(590 * MIB, "work (/s.py:4)"), stack(597 * MIB, *frames))
    ran = replace(result.ran, stacks=stacks)
    assert "`work` (s.py:4)" in explain(replace(result, ran=ran))[1]


def test_a_small_command_that_was_not_killed_has_no_line() -> None:
    stacks = (stack(39 * MIB, "work (/s.py:4)"),)
    for needed, named in ((40, False), (48, True)):
        lines = explain(made(needed=needed * MIB, stacks=stacks))
        assert ("s.py:4" in lines[1]) == named


@pytest.mark.parametrize(
    "frame",
    [
        "Connection._recv (/usr/lib/python3.11/multiprocessing/connection.py:378)",
        "Thread.join (/usr/lib/python3.11/threading.py:1112)",
        "sleep (load.py:3)",
    ],
)
def test_if_all_threads_wait_no_line_is_named(frame: str) -> None:
    result = killed()
    ran = replace(result.ran, stacks=(stack(590 * MIB, frame),))
    assert "in use when" not in "".join(explain(replace(result, ran=ran)))


def test_without_a_stack_the_last_mark_before_the_peak_tells_where_it_was() -> None:
    result = killed()
    marks = (Mark(1, "epoch 1"), Mark(2, "epoch 2"), Mark(9_000_000_000, "done"))
    ran = replace(result.ran, marks=marks, peak_ns=3)
    assert (
        "Most of this memory was in use after the command printed 'epoch 2'."
        in explain(replace(result, ran=ran))[1]
    )


def test_processes_that_were_left_are_named() -> None:
    result = made(ended=("/usr/bin/sleep 9", "sh", "cat", "tee"))
    assert explain(result) == [
        "The command ended well. weighin stopped processes that still ran at the end: sleep 9, sh, cat and 1 more."
    ]


def test_without_its_samples_the_record_splits_the_peak(tmp_path: Path) -> None:
    (at_peak,) = samples_of([90 * MIB], shmem=200 * MIB)
    result = made(needed=290 * MIB, at_peak=at_peak, samples_path="samples/gone.csv")
    for path in ("samples/gone.csv", "../x.csv", None):
        assert "(90 MiB and 200 MiB)" in answer(tmp_path, replace(result, samples_path=path))[1]


def test_the_explanation_imports_no_table_library() -> None:
    code = (
        "import sys, weighin.records.explanation\n"
        "print(sorted({'pandas', 'numpy', 'torch', 'pydantic', 'yaml'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_a_command_of_which_nothing_was_seen_is_said_with_its_end_alone() -> None:
    assert explain(made()) == ["The command ended well."]
    assert explain(replace(make_result(), ran=None)) == [
        "The command ended well under its limit of 8.00 GiB."
    ]
    assert explain(made(needed=5 * MIB)) == [
        "The command ended well.",
        "The command needs at least 5.0 MiB of memory.",
    ]
    assert explain(made(Outcome.SKIPPED)) == ["Ended: skipped."]
