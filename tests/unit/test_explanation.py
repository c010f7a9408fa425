"""The words at the end of a command's run: exact texts for each way to end."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_records import PID, made, process, samples_of, stack
from factories import make_result

from weighin.probes.sampler import write_samples
from weighin.records.explanation import answer, explain
from weighin.report.run_json import of_run
from weighin.result import Kill, Mark, OpenFile, Outcome, Peaks, Sample
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


def test_a_kill_names_its_limit_its_victim_and_its_need() -> None:
    assert explain(killed()) == [
        "Killed by the limit of 600 MiB: the kernel killed python load.py (pid 100), the first process.",
        "The command had 598 MiB of anonymous memory, not counting page cache, and tried to allocate more.",
    ]


def test_a_kill_by_a_limit_around_says_that_it_is_not_the_own_one() -> None:
    kill = Kill(PID, "python", is_main=True, limit_of="/user.slice", limit_is="around")
    result = killed()
    lines = explain(replace(result, ran=replace(result.ran, kills=(kill,))))
    assert lines[0] == (
        "Killed by the limit of the cgroup /user.slice around it, not by its own of 600 MiB:"
        " the kernel killed python load.py (pid 100), the first process."
    )
    assert lines[2] == (
        "The command reached the limit of the cgroup /user.slice around it, not its own limit."
        " Raise the limit of that cgroup."
    )


def test_a_kill_by_a_limit_around_names_its_size() -> None:
    kill = Kill(
        PID,
        "python",
        is_main=True,
        limit_of="/user.slice",
        limit_bytes=800 * MIB,
        limit_is="around",
    )
    result = killed()
    lines = explain(replace(result, ran=replace(result.ran, kills=(kill,))))
    assert lines[0] == (
        "Killed by the limit of 800 MiB of the cgroup /user.slice around it, not by its own of"
        " 600 MiB: the kernel killed python load.py (pid 100), the first process."
    )
    assert lines[2] == (
        "The command reached the limit of 800 MiB of the cgroup /user.slice around it, not its own limit."
        " Raise the limit of that cgroup."
    )


@pytest.mark.parametrize(
    ("limit_of", "words"),
    [
        ("machine", "when the whole machine had no memory left"),
        ("unknown", "for lack of memory"),
    ],
)
def test_a_kill_without_a_limit_of_a_group(limit_of: str, words: str) -> None:
    result = killed()
    kills = (Kill(PID, "python", is_main=True, limit_of=limit_of),)
    first, *rest = explain(replace(result, ran=replace(result.ran, kills=kills)))
    assert first == (
        f"Killed {words}: the kernel killed python load.py (pid 100), the first process."
    )
    assert len(rest) == 1


def test_a_kill_that_the_first_process_survived() -> None:
    result = made(
        Outcome.OOM_KILLED,
        limit=GIB,
        needed=1000 * MIB,
        kills=(
            Kill(101, "python", is_main=False),
            Kill(102, "python", is_main=False),
            Kill(103, "x", False),
        ),
        processes=(
            process(anon=2 * MIB),
            process(101, anon=900 * MIB, command="/usr/bin/python w.py"),
        ),
    )
    assert explain(result)[:2] == [
        "Killed by the limit of 1.00 GiB: the kernel killed python w.py (pid 101), python (pid 102)"
        " and 1 more, and the first process lived on.",
        "The command had 1000 MiB of anonymous memory, not counting page cache, and tried to allocate more."
        " Most of this memory was in python w.py (pid 101).",
    ]


@pytest.mark.parametrize(
    ("victim", "words"),
    [
        (
            PID,
            ", the first process. The process that grew most is python w.py (pid 101), by 90 MiB.",
        ),
        (101, ", and the first process lived on."),
    ],
)
def test_the_process_that_grew_is_named_beside_the_one_that_was_killed(
    victim: int, words: str
) -> None:
    result = made(
        Outcome.OOM_KILLED,
        limit=GIB,
        needed=1000 * MIB,
        kills=(Kill(victim, "python", is_main=victim == PID),),
        survived=victim != PID,
        processes=(
            process(anon=900 * MIB, grown_bytes=MIB),
            process(101, anon=100 * MIB, command="python w.py", grown_bytes=90 * MIB),
        ),
    )
    assert explain(result)[0].endswith(words)


def test_a_kill_without_a_log_gives_the_proof_of_the_counters() -> None:
    result = killed(
        message="the kernel killed a process for lack of memory: the command reached its RAM limit of 600 MiB"
    )
    assert explain(replace(result, ran=replace(result.ran, kills=())))[0] == (
        "The kernel killed a process for lack of memory: the command reached its RAM limit of 600"
        " MiB."
    )


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
        " Page cache: at most 383 MiB of weights.pt; /data/weights.pt cold at the start.",
    ]
    assert result.ran
    warm = replace(result, ran=replace(result.ran, cold=()))
    assert explain(warm)[1].endswith(
        " Page cache: at most 383 MiB of weights.pt; pages that other programs had read before are not charged"
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


def test_a_peak_at_the_limit_is_no_need() -> None:
    result = made(
        limit=300 * MIB,
        needed=12 * MIB,
        needed_is_sampled=False,
        peaks=Peaks(cgroup_bytes=300 * MIB),
        processes=(process(anon=12 * MIB),),
    )
    assert explain(result)[1] == (
        "The command needs 12 MiB of anonymous memory: page cache filled memory up to the limit of 300 MiB."
    )


def test_without_a_cgroup_the_need_is_sampled() -> None:
    result = made(needed=20 * MIB, processes=(process(anon=10 * MIB, shmem=10 * MIB),))
    assert explain(result) == [
        "The command ended well.",
        "The command needs at least 20 MiB of anonymous and shared memory (10 MiB and 10 MiB), as sampled.",
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
    ("frames", "code", "words"),
    [
        (("<listcomp> (/s.py:9)", "tokens (/s.py:9)", "<module> (/s.py:20)"), "", "`tokens` (s.py:9)"),
        (("<listcomp> (/s.py:9)", "<module> (/s.py:9)"), "x = [f(y)]", "`x = [f(y)]` (s.py:9)"),
        (("<module> (/s.py:9)",), "", "s.py:9"),
        (("load (/usr/lib/python3/dist-packages/vllm/a.py:3)",), "", "`load` (vllm/a.py:3)"),
        (("<module> (/app/tool/__main__.py:3)",), "", "tool/__main__.py:3"),
    ],
)  # fmt: skip
def test_how_a_line_is_named(frames: tuple[str, ...], code: str, words: str) -> None:
    result = killed()
    ran = replace(result.ran, stacks=(replace(stack(590 * MIB, *frames), code=code),))
    assert (
        f" Most of this memory was in use when {words} ran." in explain(replace(result, ran=ran))[1]
    )


def test_a_stack_far_below_the_peak_does_not_tell_where_it_was() -> None:
    result = killed()
    ran = replace(result.ran, stacks=(stack(300 * MIB, "<module> (/s.py:9)"),))
    assert "s.py" not in "".join(explain(replace(result, ran=ran)))


def test_a_thread_that_waits_is_not_where_the_memory_went() -> None:
    result = killed()
    stacks = (
        stack(590 * MIB, "wait (/usr/lib/python3.11/threading.py:320)", "<module> (/s.py:9)"),
        replace(stack(590 * MIB, "work (/s.py:4)"), thread="worker"),
    )
    ran = replace(result.ran, stacks=stacks)
    assert "`work` (s.py:4)" in explain(replace(result, ran=ran))[1]


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


def test_the_samples_of_a_run_split_the_peak(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    samples = samples_of([10 * MIB, 90 * MIB], shmem=200 * MIB)
    write_samples(tmp_path / "samples" / "x.csv", samples)
    result = made(needed=290 * MIB, peak_ns=samples[1].t_ns, samples_path="samples/x.csv")
    assert "(90 MiB and 200 MiB)" in answer(tmp_path, result)[1]
    (tmp_path / "samples" / "x.csv").write_text("t_ns,rss_bytes\n1,2\nx,y\n")
    assert "(" not in answer(tmp_path, result)[1]
    assert "(" not in answer(tmp_path, replace(result, samples_path="../x.csv"))[1]


def test_the_json_of_a_run_of_one_command_has_the_words() -> None:
    result = made(Outcome.COMMAND_FAILED, message="exit code 3")
    assert of_run(Path("run"), [result], [])["answer"] == ["Exit code 3."]
    assert "answer" not in of_run(Path("run"), [result, result], [])
    assert "answer" not in of_run(Path("run"), [make_result()], [])


def test_the_explanation_imports_no_table_library() -> None:
    code = (
        "import sys, weighin.records.explanation\n"
        "print(sorted({'pandas', 'numpy', 'torch', 'pydantic', 'yaml'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_the_kills_of_an_answer_are_counted() -> None:
    def words(count: int, oom_kills: int, main: int = -1) -> str:
        kills = tuple(Kill(PID + n, "x", is_main=n == main) for n in range(count))
        result = made(Outcome.OOM_KILLED, limit=GIB, kills=kills, survived=main < 0)
        line = explain(replace(result, oom_kills=oom_kills))[0]
        return line.removeprefix("Killed by the limit of 1.00 GiB: the kernel killed ")

    lived = ", and the first process lived on."
    assert words(1, 1) == f"x (pid 100){lived}"
    assert words(2, 1) == f"x (pid 100), x (pid 101){lived}"
    assert words(2, 3) == f"x (pid 100), x (pid 101) and 1 more{lived}"
    assert words(3, 0, 0) == "x (pid 100), x (pid 101) and 1 more, the first process among them."
    assert words(1, 1, 0) == "x (pid 100), the first process."
    kill = (Kill(PID, "x", is_main=False),)
    assert "first process" not in explain(made(Outcome.OOM_KILLED, kills=kill, survived=False))[0]


def test_kills_of_two_limits_name_neither() -> None:
    kills = (Kill(PID, "x", is_main=True), Kill(101, "x", is_main=False, limit_of="unknown"))
    assert explain(made(Outcome.OOM_KILLED, limit=GIB, kills=kills))[0].startswith(
        "Killed for lack of memory: "
    )
    alone = made(Outcome.OOM_KILLED, kills=kills[:1])
    assert explain(alone)[0].startswith("Killed for lack of memory: ")


@pytest.mark.parametrize(
    ("anon", "shmem", "kinds"),
    [
        (900 * MIB, 9 * MIB, "anonymous memory"),  # less than 1 % of both
        (890 * MIB, 10 * MIB, "anonymous and shared memory (890 MiB and 10 MiB)"),
        (9 * MIB, 900 * MIB, "shared memory"),
        (10 * MIB, 890 * MIB, "anonymous and shared memory (10 MiB and 890 MiB)"),
        (20 * MIB, MIB - 1, "anonymous memory"),  # less than 1 MiB
        (20 * MIB, MIB, "anonymous and shared memory (20 MiB and 1.0 MiB)"),
        (MIB - 1, 20 * MIB, "shared memory"),
        (MIB, 20 * MIB, "anonymous and shared memory (1.0 MiB and 20 MiB)"),
    ],
)
def test_a_need_names_the_kinds_of_memory_that_matter(anon: int, shmem: int, kinds: str) -> None:
    result = made(needed=anon + shmem, processes=(process(anon=anon, shmem=shmem),))
    assert f" of {kinds}, as sampled." in explain(result)[1]


def test_a_command_of_which_nothing_was_seen_is_said_with_its_end_alone() -> None:
    assert explain(made()) == ["The command ended well."]
    assert explain(replace(make_result(), ran=None)) == [
        "The command ended well under its limit of 8.00 GiB."
    ]
    assert explain(made(needed=5 * MIB)) == [
        "The command ended well.",
        "The command needs at least 5.0 MiB of memory, as sampled.",
    ]
    assert explain(made(Outcome.SKIPPED)) == ["Ended: skipped."]


@pytest.mark.parametrize(
    ("peak", "is_limit"), [(294 * MIB, True), (294 * MIB - 1, False), (300 * MIB, True)]
)
def test_a_peak_is_the_limits_from_98_percent_on(peak: int, is_limit: bool) -> None:
    result = made(limit=300 * MIB, needed=20 * MIB, peaks=Peaks(cgroup_bytes=peak))
    assert ("page cache filled memory up to the limit" in explain(result)[1]) == is_limit
    unlimited = made(needed=20 * MIB, peaks=Peaks(cgroup_bytes=peak))
    assert "; the peak with page cache is " in explain(unlimited)[1]


@pytest.mark.parametrize(("most", "is_named"), [(51, True), (50, False)])
def test_a_process_with_more_than_half_of_the_memory_is_named(most: int, is_named: bool) -> None:
    processes = (process(anon=most * MIB), process(101, anon=(100 - most) * MIB, parent=2))
    said = explain(made(needed=100 * MIB, processes=processes))[1]
    assert (" Most of this memory was in the first process." in said) == is_named
    assert "Most" not in explain(made(needed=9 * MIB, processes=processes[:1]))[1]


def test_a_mark_at_the_peak_is_the_last_one_before_it() -> None:
    marks = (Mark(1, "epoch 1"), Mark(3, "epoch 2"))
    for peak_ns, text in ((3, "epoch 2"), (2, "epoch 1"), (0, ""), (None, "")):
        said = explain(made(needed=MIB, marks=marks, peak_ns=peak_ns))[1]
        assert (f"after the command printed {text!r}." in said) == bool(text)


@pytest.mark.parametrize(
    ("cached", "said"),
    [
        (MIB, "Page cache: at most 1.0 MiB of b.bin, a.bin and 1 more; "),
        (MIB - 1, "Page cache: none; "),
    ],
)
def test_page_cache_counts_from_1_mib_on_and_its_largest_files_are_named(
    cached: int, said: str
) -> None:
    files = tuple(OpenFile(f"/{name}.bin", size) for name, size in (("c", 1), ("a", 2), ("b", 3)))
    result = made(
        needed=MIB,
        peaks=Peaks(cgroup_bytes=5 * MIB, file_sampled_bytes=cached),
        processes=(process(anon=MIB, files=files),),
    )
    assert said in explain(result)[1]


def test_page_cache_without_files_is_said_only_if_there_is_any() -> None:
    for peaks, cold, said in (
        (Peaks(cgroup_bytes=5, file_sampled_bytes=0), (), False),
        (Peaks(cgroup_bytes=5, file_sampled_bytes=MIB), (), True),
        (Peaks(cgroup_bytes=5, file_sampled_bytes=0), ("/a",), True),
        (Peaks(cgroup_bytes=5), ("/a",), False),
        (Peaks(file_sampled_bytes=MIB), ("/a",), False),
    ):
        result = made(needed=MIB, peaks=peaks, cold=cold, processes=(process(anon=MIB),))
        assert ("Page cache: " in "".join(explain(result))) == said
    three = made(
        needed=MIB, peaks=Peaks(cgroup_bytes=5, file_sampled_bytes=MIB), cold=("/a", "/b", "/c")
    )
    assert "Page cache: at most 1.0 MiB; /a, /b cold at the start." in explain(three)[1]


def test_processes_of_one_command_line_that_were_left_are_counted() -> None:
    result = made(ended=("sh", "/usr/bin/sleep 9", "sleep 9"))
    assert explain(result)[0].endswith("at the end: sleep 9 (2), sh.")


@pytest.mark.parametrize(
    ("limit_is", "place"),
    [
        ("around", " around it"),
        ("below", " below its own"),
        ("elsewhere", " outside its own"),
        ("", ""),
    ],
)
def test_a_kill_says_where_the_other_limit_is(limit_is: str, place: str) -> None:
    kill = Kill(PID, "python", is_main=True, limit_of="/a/b", limit_is=limit_is)
    result = killed()
    assert result.ran
    lines = explain(replace(result, ran=replace(result.ran, kills=(kill,))))
    assert lines[0].startswith(f"Killed by the limit of the cgroup /a/b{place}, not by its own of")


def at_peak(**sizes: int) -> Sample:
    """Return a sample of a cgroup; sizes are in MiB."""
    named = {f"{name}_bytes": size * MIB for name, size in sizes.items()}
    return replace(Sample(1, 0, 0, 0, 0, 0, 0, 0), **named)


@pytest.mark.parametrize(
    ("sample", "needed", "kinds"),
    [
        (at_peak(anon=1, kernel=150), 151, "kernel memory"),
        (at_peak(anon=40, kernel=60), 100, "anonymous and kernel memory (40 MiB and 60 MiB)"),
        (at_peak(kernel=90, kernel_reclaimable=85), 60, "memory that the kernel cannot reclaim (samples saw 5.0 MiB kernel)"),
        (at_peak(socket=70), 70, "kernel memory"),
        (at_peak(file=100, locked=100), 100, "locked memory"),
        (at_peak(anon=200, freed=200), 200, "anonymous memory"),
        (at_peak(anon=5), 60, "memory that the kernel cannot reclaim (samples saw 5.0 MiB anonymous)"),
        (at_peak(), 60, "memory"),
    ],
)  # fmt: skip
def test_a_need_is_named_by_the_kinds_that_were_read(
    sample: Sample, needed: int, kinds: str
) -> None:
    result = made(Outcome.OK, needed=needed * MIB, at_peak=sample, needed_is_sampled=False)
    result = replace(result, peaks=Peaks(cgroup_bytes=(needed + 1) * MIB))
    (_, line) = explain(result)[:2]
    assert line.startswith(f"The command needs {needed} MiB of {kinds}")


def test_the_kernels_mark_and_its_log_count_where_the_samples_saw_less() -> None:
    result = made(Outcome.OOM_KILLED, needed=60 * MIB, at_peak=at_peak())
    assert result.ran
    marked = replace(result, peaks=Peaks(cgroup_bytes=60 * MIB, kernel_bytes=59 * MIB))
    kill = Kill(PID, "x", is_main=True, kernel_bytes=59 * MIB)
    logged = replace(result, ran=replace(result.ran, kills=(kill,)))
    for one in (marked, logged):
        assert "had 60 MiB of kernel memory, not counting page cache" in explain(one)[1]
