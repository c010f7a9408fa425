"""What the record of a command proves: where its memory was taken, and how large its parts were."""

from dataclasses import replace

import pytest
from command_records import made, process, samples_of, stack

from weighin.records.facts import (
    Facts,
    Frame,
    Place,
    held_by,
    is_waiting,
    names,
    own,
    place_of,
    program,
    read_all,
    size,
)
from weighin.result import OpenFile, Outcome, Process, Result, Sample, Stack
from weighin.units import GIB, MIB

FRAMES = ("<module> (script.py:14)", "<module> (main.py:3)")
CODE = "state = torch.load(path)"


def place(number: int, code: str, *inner: str) -> Place:
    """The place that is the frame with this number, counted from the innermost."""
    frames = (*inner, *FRAMES)
    return Place(stack(100, *frames, code=code), read_all(frames), number)


@pytest.mark.parametrize(
    ("found", "title"),
    [
        (place(0, CODE), f"`{CODE}` (script.py:14)"),
        (place(0, "x" * 48), f"`{'x' * 48}` (script.py:14)"),
        (place(0, "x" * 49), "script.py:14"),  # too long for a sentence
        (place(1, CODE), "main.py:3"),  # the code is that of the innermost line
        (place(1, CODE, "load (a.py:1)"), "`load` (script.py:14)"),
    ],
)
def test_a_place_shows_its_function_or_its_short_code(found: Place, title: str) -> None:
    assert found.title == title


def test_a_command_of_which_nothing_was_seen_has_no_parts() -> None:
    result = made(Outcome.OK, needed=5 * MIB)
    assert result.ran
    facts = Facts(result, replace(result.ran, processes=()))
    assert (facts.at_peak.anon_bytes, facts.at_peak.shmem_bytes, facts.held_bytes) == (0, 0, 0)


def test_the_parts_are_those_of_the_sample_nearest_to_the_peak() -> None:
    samples = samples_of([10 * MIB, 30 * MIB, 20 * MIB], shmem=MIB)
    result = made(Outcome.OK, needed=31 * MIB)
    assert result.ran
    ran = replace(result.ran, peak_ns=samples[1].t_ns + 10)
    facts = Facts(result, ran, samples)
    assert (facts.at_peak.anon_bytes, facts.at_peak.shmem_bytes) == (30 * MIB, MIB)
    assert facts.held_bytes == 31 * MIB


def test_without_samples_the_parts_are_those_of_the_processes_that_were_there() -> None:
    processes = (
        process(anon=7 * MIB),
        process(pid=101, anon=2 * MIB),
        replace(process(pid=102, anon=1), anon_bytes=None),
    )
    result = made(Outcome.OK, needed=9 * MIB, processes=processes)
    assert result.ran
    facts = Facts(result, result.ran)
    assert facts.at_peak.anon_bytes == 9 * MIB
    assert [each.pid for each in facts.present] == [processes[0].pid, 101]


@pytest.mark.parametrize(
    ("shmem", "file_in_group", "cached"),
    [(2, 7, 5), (7, 7, 0), (9, 7, 0), (2, None, 3)],
)
def test_page_cache_is_that_of_the_group_without_shared_memory(
    shmem: int, file_in_group: int | None, cached: int
) -> None:
    in_group = None if file_in_group is None else file_in_group * MIB
    sample = Sample(1, 0, MIB, 3 * MIB, shmem * MIB, 0, 0, 0, cgroup_file_bytes=in_group)
    result = made(Outcome.OK, needed=MIB)
    assert result.ran
    facts = Facts(result, replace(result.ran, peak_ns=5), [sample])
    at = facts.at_peak
    assert (at.anon_bytes, at.shmem_bytes, at.page_cache_bytes) == (
        MIB,
        shmem * MIB,
        cached * MIB,
    )
    unknown = Facts(result, result.ran, [sample])  # the time of the peak is not known
    assert unknown.held_bytes == 0


def facts_of(*stacks: Stack, needed: int = 100, processes: tuple[Process, ...] = ()) -> Facts:
    result: Result = made(Outcome.OK, needed=needed, stacks=stacks, processes=processes)
    assert result.ran
    return Facts(result, result.ran)


WAITS = "wait (/usr/lib/python3.11/threading.py:320)"


@pytest.mark.parametrize(
    ("usage", "needed", "held", "is_near"),
    [(75, 100, 0, True), (74, 100, 0, False), (75, 0, 100, True), (74, 0, 100, False)],
)
def test_a_stack_near_the_peak_tells_the_place(
    usage: int, needed: int, held: int, is_near: bool
) -> None:
    processes = (process(anon=held),) if held else ()
    facts = facts_of(stack(usage, "work (a.py:3)"), needed=needed, processes=processes)
    assert (facts.place is not None) == is_near


def test_of_the_threads_at_the_peak_the_one_of_the_largest_process_counts() -> None:
    small, large = process(anon=10), process(101, anon=20)
    earlier = stack(99, "early (a.py:1)", t_ns=1)
    now = [
        stack(100, "small (a.py:2)", t_ns=2),
        stack(100, "large (a.py:3)", pid=101, t_ns=2),
        stack(100, WAITS, pid=101, t_ns=2),
    ]
    facts = facts_of(earlier, *now, processes=(small, large))
    assert facts.place and facts.place.function == "large"
    waiting = facts_of(*now[::2], processes=(small, large))
    assert waiting.place and waiting.place.function == "small"
    assert facts_of(now[2], processes=(large,)).place is None
    assert [place.function for place in facts.places] == ["early", "small", "large", "wait"]


def test_only_growth_between_stacks_that_agree_counts() -> None:
    usages = [(10, "a"), (40, "a"), (30, "a"), (35, "a"), (70, "b"), (90, "a"), (95, "a")]
    stacks = [stack(usage, f"{name} (x.py:1)", t_ns=t) for t, (usage, name) in enumerate(usages, 1)]
    others = [stack(500, "a (x.py:1)", pid=101, t_ns=3), stack(60, WAITS, t_ns=5)]
    facts = facts_of(*reversed(stacks), *others)
    assert facts.grown(100, lambda one: one.function == "a") == 30 + 5 + 5
    assert facts.grown(101, lambda _: True) == 0


def test_growth_since_a_file_was_opened_is_that_of_anonymous_memory() -> None:
    samples = samples_of([10, 30, 60])
    result = made(Outcome.OK, needed=60)
    assert result.ran
    facts = Facts(result, replace(result.ran, peak_ns=samples[2].t_ns), samples)
    file = OpenFile("/a.pt", 50, seen_ns=samples[1].t_ns + 9)
    assert facts.grown_since([file]) == 30
    assert facts.grown_since([replace(file, seen_ns=None)]) == 0
    assert Facts(result, result.ran).grown_since([file]) == 0


def test_the_checkpoints_that_a_process_read_come_largest_first() -> None:
    paths = ("/a.pt", "/b.pth", "/c.bin", "/d.ckpt", "/e.safetensors", "/f.gguf", "/g.pkl",
             "/h.npy", "/i.npz", "/j.h5", "/k.msgpack", "/l.distcp")  # fmt: skip
    files = [OpenFile(path, 100 + number) for number, path in enumerate(paths)]
    more = (
        OpenFile("/log.txt", 500),
        OpenFile("/half.pt", 500, mapped_bytes=250),
        OpenFile("/less.pt", 500, mapped_bytes=249),
    )
    facts = facts_of(processes=(process(anon=1, files=(*files, *more)),))
    found = [file.path for file in facts.read_files(100)]
    assert found == ["/less.pt", *reversed(paths)]
    assert facts.read_files(7) == []


def test_a_pid_that_was_used_twice_is_that_of_the_last_process() -> None:
    first, second = process(anon=1), process(anon=2)
    facts = facts_of(processes=(first, second, process(101, anon=3)))
    assert facts.process(100) is second
    assert facts.process(5) is None
    assert facts.holder == process(101, anon=3)
    assert facts_of().holder is None
    assert held_by(replace(first, anon_bytes=None, shmem_bytes=None)) == 0
    assert held_by(replace(first, shmem_bytes=4)) == 5


def test_the_place_of_a_stack_is_the_programs_own_line() -> None:
    library = "load (/v/site-packages/torch/a.py:1)"
    inner = place_of(stack(1, library, "Model.run (m.py:2)", "<module> (m.py:9)"))
    assert inner and (inner.frame.line, inner.function) == (2, "load")
    alone = place_of(stack(1, library, "call (/v/site-packages/x.py:5)"))
    assert alone and (alone.frame.line, alone.function) == (1, "load")
    assert place_of(stack(1, "not a frame")) is None
    imported = place_of(
        stack(1, "exec_module (<frozen importlib._bootstrap>:9)", "<module> (m.py:3)")
    )
    assert imported and imported.function == "import"


@pytest.mark.parametrize(
    ("frames", "function"),
    [
        (("<listcomp> (a.py:1)", "run (a.py:4)"), "run"),
        (("<listcomp> (a.py:1)", "run (b.py:4)"), ""),
        (("<listcomp> (a.py:1)", "<module> (a.py:4)", "run (a.py:9)"), ""),
        (("<listcomp> (a.py:1)",), ""),
        (("Model.run (a.py:1)",), "Model.run"),
    ],
)
def test_the_function_of_a_line(frames: tuple[str, ...], function: str) -> None:
    found = place_of(stack(1, *frames))
    assert found and found.function == function


FOR_IT = ("Condition.wait (/usr/lib/python3.11/threading.py:320)", "load_all (app.py:7)")
INSIDE = (
    "pread (/v/site-packages/loader/io.py:80)",
    "Thread.run (/usr/lib/python3.11/threading.py:982)",
)
AT_EXIT = (
    "_del_library (/v/site-packages/torch/library.py:665)",
    "finalize._exitfunc (/usr/lib/python3.11/weakref.py:666)",
)
HOOK = ("_exit_function (/usr/lib/python3.11/multiprocessing/util.py:360)",)


@pytest.mark.parametrize(
    ("readings", "line"),
    [
        ([(90, FOR_IT), (90, INSIDE)], "app.py:7"),  # a library's thread works for this line
        ([(90, INSIDE)], "loader/io.py:80"),  # nobody's line is known
        ([(80, ("main (app.py:9)",)), (90, FOR_IT)], "app.py:9"),  # at the peak it waits
        ([(80, ("main (app.py:9)",)), (90, HOOK)], "app.py:9"),
        ([(80, ("main (app.py:9)",)), (90, AT_EXIT)], "app.py:9"),
        ([(90, AT_EXIT)], ""),  # the program's own code has ended
        ([(74, ("main (app.py:9)",)), (90, FOR_IT)], ""),  # too far below the peak
        ([(90, FOR_IT)], ""),
    ],
)
def test_the_line_is_walked_up_to_the_users_own(
    readings: list[tuple[int, tuple[str, ...]]], line: str
) -> None:
    stacks = tuple(stack(mib * MIB, *frames) for mib, frames in readings)
    result = made(needed=100 * MIB, processes=(process(anon=100 * MIB),), stacks=stacks)
    assert result.ran
    place = Facts(result, result.ran).place
    assert (place.frame.place if place else "") == line


def test_the_line_is_that_of_the_process_that_grew_most() -> None:
    lines = {100: "<module> (server.py:3)", 101: "<module> (indexer.py:5)"}
    stacks = tuple(stack(95 * MIB, line, pid=pid, t_ns=1) for pid, line in lines.items())
    processes = (
        process(anon=60 * MIB, grown_bytes=0),
        process(101, anon=40 * MIB, grown_bytes=40 * MIB),
    )
    result = made(needed=100 * MIB, processes=processes, stacks=stacks)
    assert result.ran
    facts = Facts(result, result.ran)
    assert facts.place and facts.place.frame.place == "indexer.py:5"
    assert facts.grower and facts.grower.pid == 101


@pytest.mark.parametrize(
    ("frames", "code", "waits"),
    [
        (("wait (a.py:1)",), "", True),
        (("Queue._wait (a.py:1)",), "", True),
        (("waits (a.py:1)",), "", False),
        (("barrier (/v/site-packages/torch/distributed/distributed_c10d.py:4800)",), "", True),
        (("get (/usr/lib/python3.11/queue.py:1)",), "", True),
        (("run (/usr/lib/python3.11/concurrent/futures/thread.py:1)",), "", True),
        (("get (queue.py:1)",), "", False),
        (("run (a.py:1)",), "thread.join()", True),
        (("run (a.py:1)",), "os.waitpid(pid, 0)", True),
        (("run (a.py:1)",), "x = joined(y)", False),
        (("run (/v/site-packages/a.py:1)", "main (b.py:2)"), "thread.join()", False),
    ],
)
def test_which_threads_only_wait(frames: tuple[str, ...], code: str, waits: bool) -> None:
    found = place_of(stack(1, *frames, code=code))
    assert found and is_waiting(found) == waits


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (GIB, "1.00 GiB"), (GIB - 1, "1024 MiB"), (10 * MIB, "10 MiB"),
        (10 * MIB - 1, "10.0 MiB"), (9 * MIB + MIB // 2, "9.5 MiB"),
    ],
)  # fmt: skip
def test_a_size_in_a_sentence(number: int, text: str) -> None:
    assert size(number) == text


def test_a_program_in_a_sentence() -> None:
    assert program("/usr/bin/python /srv/x.py a/b -c") == "python x.py a/b -c"
    assert program("x" * 72) == "x" * 72
    assert program("x" * 73) == "x" * 69 + "..."
    files = [OpenFile(f"/d/{name}", 1) for name in "abc"]
    assert (names(files[:2]), names(files)) == ("a, b", "a, b and 1 more")


@pytest.mark.parametrize(
    ("path", "place", "is_library"),
    [
        ("/home/me/a.py", "a.py:7", False),
        ("tool/__main__.py", "tool/__main__.py:7", False),
        ("/x/pkg/__init__.py", "pkg/__init__.py:7", False),
        ("a.py", "a.py:7", False),
        ("/v/lib/python3.11/site-packages/torch/nn/a.py", "torch/nn/a.py:7", True),
        ("/usr/lib/python3/dist-packages/x/__init__.py", "x/__init__.py:7", True),
        ("/usr/lib/python3.13t/threading.py", "threading.py:7", True),
        ("<frozen runpy>", "<frozen runpy>:7", True),
    ],
)
def test_the_place_of_a_frame(path: str, place: str, is_library: bool) -> None:
    (frame,) = read_all([f"run ({path}:7)"])
    assert frame == Frame("run", path, 7)
    assert (frame.place, frame.is_library) == (place, is_library)
    assert own([frame]) == (None if is_library else frame)


@pytest.mark.parametrize(
    ("function", "name", "short"),
    [
        ("Server.answer", "Server.answer", "answer"),
        ("<module>", "", ""),
        ("run.<locals>.<lambda>", "run", "run"),
        ("A.run.<locals>.inner", "A.run.inner", "inner"),
        ("<genexpr>", "", ""),
    ],
)
def test_the_name_of_a_function(function: str, name: str, short: str) -> None:
    frame = Frame(function, "a.py", 1)
    assert (frame.name, frame.short_name) == (name, short)
    assert read_all(["no frame"]) == ()
