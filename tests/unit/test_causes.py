"""Each rule of the table of causes: a record for which it holds, and one for which it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ran_commands import PID, SECOND_NS, made, process, samples_of, stack

from weighin.records.explanation import Cause, Facts
from weighin.result import Kill, OpenFile, Outcome, Peaks, Process, Result, Sample
from weighin.units import MIB

TORCH = "/v/lib/python3.11/site-packages/torch"
LOADS = (
    f"_load_from_state_dict ({TORCH}/nn/modules/module.py:2430)",
    f"Module.load_state_dict ({TORCH}/nn/modules/module.py:2600)",
    "<module> (load.py:14)",
)
READS = (f"load_tensor ({TORCH}/serialization.py:1200)", "<module> (load.py:13)")
IMPORTS = (
    "<listcomp> (parts/tables.py:3)",
    "<module> (parts/tables.py:3)",
    "_call_with_frames_removed (<frozen importlib._bootstrap>:241)",
    "exec_module (<frozen importlib._bootstrap_external>:940)",
    "<module> (load.py:3)",
)
WEIGHTS = OpenFile("/data/my weights.pt", 256 * MIB, 256 * MIB, is_open=False, seen_ns=100_000_000)
TWO_COPIES = [100 * MIB, 300 * MIB, 540 * MIB]
"""The anonymous memory of a process that reads 256 MiB and copies most of it."""


def sizes(*mib: float) -> list[int]:
    return [round(each * MIB) for each in mib]


def killed(anon: list[int], *, shmem: int = 0, **ran: Any) -> tuple[Result, list[Sample]]:
    """A command with this anonymous memory, until its limit of 600 MiB killed it."""
    samples = samples_of(anon, shmem=shmem)
    ran = {"processes": (process(anon=anon[-1], shmem=shmem),)} | ran
    result = made(
        Outcome.OOM_KILLED,
        limit=600 * MIB,
        needed=anon[-1] + shmem,
        at_peak=samples[-1],
        kills=(Kill(PID, "python", is_main=True),),
        **ran,
    )
    return result, samples


def found(result: Result, samples: list[Sample], *, without: str = "") -> Cause | None:
    assert result.ran
    cause = Facts(result, result.ran, samples).cause
    assert cause is None or cause.name != without
    return cause


def loading(files: tuple[OpenFile, ...] = (WEIGHTS,), anon: list[int] | None = None) -> Any:
    anon = anon or TWO_COPIES
    return killed(
        anon,
        processes=(process(anon=anon[-1], files=files),),
        stacks=(stack(120 * MIB, *READS), stack(anon[-1] - MIB, *LOADS)),
    )


def test_two_copies_of_the_weights() -> None:
    cause = found(*loading())
    assert cause
    assert cause.name == "two copies"
    assert cause.words == (
        "Two copies of the weights were in memory: 256 MiB read from my weights.pt, and the model's own."
    )
    assert cause.hint == (
        "Try torch.load(..., mmap=True): weighin recommend '/data/my weights.pt' --ram 600MiB"
    )


def test_a_model_that_was_built_before_the_weights_were_read_is_a_copy() -> None:
    builds = (f"Linear.reset_parameters ({TORCH}/nn/modules/linear.py:120)", "<module> (load.py:9)")
    anon = [100 * MIB, 400 * MIB, 500 * MIB]
    late = replace(WEIGHTS, seen_ns=200_000_000)
    result, samples = killed(
        anon,
        processes=(process(anon=anon[-1], files=(late,)),),
        stacks=(stack(200 * MIB, *builds), stack(499 * MIB, *READS)),
    )
    cause = found(result, samples)
    assert cause
    assert cause.name == "two copies"
    assert result.ran
    not_built = replace(result, ran=replace(result.ran, stacks=(stack(499 * MIB, *READS),)))
    assert name_of((not_built, samples)) == "a whole file"


def model_beside(*anon: int, built_from: int = 120) -> tuple[Result, list[Sample]]:
    """A model that was built from ``built_from`` MiB on, and then a file of 256 MiB is read."""
    builds = (f"constant_ ({TORCH}/nn/init.py:165)", "<module> (load.py:9)")
    late = replace(WEIGHTS, seen_ns=200_000_000)
    return killed(
        sizes(*anon),
        processes=(process(anon=anon[-1] * MIB, files=(late,)),),
        stacks=(stack(built_from * MIB, *builds), stack((anon[-1] - 1) * MIB, *READS)),
    )


def test_of_a_copy_that_is_not_read_to_its_end_the_amount_is_what_was_read() -> None:
    cause = found(*model_beside(100, 400, 480))
    assert cause
    assert (cause.name, cause.words) == (
        "two copies",
        "Two copies of the weights were in memory: 80 MiB read from my weights.pt, and the model's own.",
    )
    assert cause.hint.startswith("Try torch.load(..., mmap=True): ")


@pytest.mark.parametrize(
    ("files", "anon"),
    [
        ((), TWO_COPIES),  # no checkpoint was read
        ((replace(WEIGHTS, mapped_bytes=256 * MIB),), TWO_COPIES),  # it is page cache
        ((replace(WEIGHTS, path="/data/log.txt"),), TWO_COPIES),  # no checkpoint
        ((WEIGHTS,), [300 * MIB, 400 * MIB, 550 * MIB]),  # grew by less than was read
        ((replace(WEIGHTS, seen_ns=None),), TWO_COPIES),  # unknown by how much it grew
    ],
)
def test_one_copy_of_the_weights(files: tuple[OpenFile, ...], anon: list[int]) -> None:
    assert found(*loading(files, anon)) is None


def converting(code: str, anon: list[int]) -> tuple[Result, list[Sample]]:
    half = replace(WEIGHTS, size_bytes=128 * MIB)
    place = stack(anon[-1], "<module> (load.py:10)", code=code)
    return killed(anon, processes=(process(anon=anon[-1], files=(half,)),), stacks=(place,))


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("converted[name] = tensor.float()", ".float()"),
        ("model.half()", ".half()"),
        ("x = x.to(torch.float32)", ".to()"),
        ("x = x.to(dtype=kind)", ".to()"),
        ("a = a.astype('f4')", ".astype()"),
    ],
)
def test_a_conversion_of_the_dtype(code: str, call: str) -> None:
    cause = found(*converting(code, [100 * MIB, 300 * MIB, 420 * MIB]))
    assert cause
    assert cause.name == "dtype conversion"
    assert cause.words == (
        f"`{call}` made new tensors in addition to the 128 MiB read from my weights.pt:"
        " memory grew by 320 MiB."
    )


@pytest.mark.parametrize(
    ("code", "anon"),
    [
        ("x = x.to(device)", [100 * MIB, 300 * MIB, 420 * MIB]),
        ("x = x.float()", [300 * MIB, 400 * MIB, 420 * MIB]),
        ("x = model(x)", [100 * MIB, 300 * MIB, 420 * MIB]),
    ],
)
def test_no_conversion_of_the_dtype(code: str, anon: list[int]) -> None:
    assert found(*converting(code, anon)) is None


def reading(code: str, file: OpenFile, usage: int = 300 * MIB) -> tuple[Result, list[Sample]]:
    anon = [10 * MIB, 150 * MIB, 300 * MIB]
    return killed(
        anon,
        processes=(process(anon=anon[-1], files=(file,)),),
        stacks=(stack(usage, "<module> (load.py:7)", code=code),),
    )


BIG = OpenFile("/data/big.bin", 600 * MIB, 0, seen_ns=100_000_000)


@pytest.mark.parametrize("code", ["text = file.read()", "Path(x).read_bytes()", "np.fromfile(f)"])
def test_a_whole_file_that_is_read(code: str) -> None:
    cause = found(*reading(code, BIG))
    assert cause
    assert (cause.name, cause.words) == (
        "a whole file",
        "The program read a whole file into memory: big.bin has 600 MiB, and memory grew by 290 MiB.",
    )


@pytest.mark.parametrize(
    ("code", "file", "usage"),
    [
        ("piece = file.read(4096)", BIG, 300 * MIB),
        ("text = file.read()", replace(BIG, mapped_bytes=600 * MIB), 300 * MIB),
        ("text = file.read()", replace(BIG, size_bytes=64 * MIB), 300 * MIB),
        ("text = file.read()", replace(BIG, is_open=False), 300 * MIB),  # nor was all of it read
        ("text = file.read()", replace(BIG, position_bytes=600 * MIB), 40 * MIB),
    ],
)
def test_no_whole_file(code: str, file: OpenFile, usage: int) -> None:
    assert found(*reading(code, file, usage)) is None


def test_a_whole_file_that_was_read_to_its_end_before_it_was_closed() -> None:
    """The first sample that found it open was late, so that less than its size is seen to grow."""
    closed = replace(BIG, size_bytes=340 * MIB, position_bytes=340 * MIB, is_open=False)
    assert name_of(reading("text = file.read()", closed)) == "a whole file"
    assert name_of(reading("text = file.read()", replace(closed, position_bytes=0))) == ""


def test_a_checkpoint_that_is_read_into_memory_is_a_whole_file() -> None:
    file = replace(WEIGHTS, position_bytes=100 * MIB, is_open=True)
    case = killed(
        sizes(100, 150, 250),
        processes=(process(anon=250 * MIB, files=(file,)),),
        stacks=(stack(240 * MIB, *READS),),
    )
    cause = found(*case)
    assert cause
    assert (cause.name, cause.words) == (
        "a whole file",
        "The program read a whole file into memory: my weights.pt has 256 MiB, and memory grew by 150 MiB.",
    )
    assert cause.hint == (
        "Try torch.load(..., mmap=True): weighin recommend '/data/my weights.pt' --ram 600MiB"
    )


PARSES = (
    "load (/usr/lib/python3.11/json/__init__.py:293)",
    "read (load.py:9)",
    "main (load.py:20)",
)


def parsing(*frames: str) -> tuple[Result, list[Sample]]:
    rows = OpenFile("/data/rows.json", 60 * MIB, 60 * MIB, seen_ns=100_000_000)
    return killed(
        sizes(10, 150, 300),
        processes=(process(anon=300 * MIB, files=(rows,)),),
        stacks=(stack(290 * MIB, *frames),),
    )


def test_a_file_that_is_parsed_at_once_says_what_became_of_it() -> None:
    cause = found(*parsing(*PARSES))
    assert cause
    assert cause.words == (
        "The program read a whole file into memory: rows.json has 60 MiB, and memory grew by 290 MiB."
    )
    assert name_of(parsing(*PARSES[1:])) == ""  # it does something else with an open file
    assert name_of(parsing("load (/srv/json/app.py:9)")) == ""  # a file of the user


def test_an_import_names_the_module_and_the_line_that_imports_it() -> None:
    result, samples = killed(
        [300 * MIB], stacks=(stack(30 * MIB, *IMPORTS), stack(299 * MIB, *IMPORTS))
    )
    cause = found(result, samples)
    assert cause
    assert (cause.name, cause.words) == (
        "import",
        "Most of the memory was allocated while tables.py was imported by load.py:3.",
    )
    mostly_before = (stack(30 * MIB, "<module> (load.py:2)"), stack(299 * MIB, *IMPORTS))
    assert result.ran
    assert found(replace(result, ran=replace(result.ran, stacks=mostly_before)), samples) is None


def test_a_busy_thread_beside_the_import_does_not_hide_it() -> None:
    busy = ("spin (load.py:30)",)
    stacks = tuple(stack(n * MIB, *frames) for n in (30, 299) for frames in (IMPORTS, busy))
    assert name_of(killed([300 * MIB], stacks=stacks)) == "import"


def test_only_what_grew_during_the_import_counts() -> None:
    """A later import of the same line, once the function that it imported has taken the memory."""
    between = ("work (load.py:9)", "<module> (load.py:5)")
    usages = ((22, IMPORTS), (290, between), (295, IMPORTS))
    stacks = tuple(stack(usage * MIB, *frames) for usage, frames in usages)
    assert name_of(killed([300 * MIB], stacks=stacks)) == ""


def forked(
    copied: int | None, command: str = "/usr/bin/python load.py"
) -> tuple[Result, list[Sample]]:
    """Three children that hold 110 MiB each, of which ``copied`` MiB each were their parent's."""
    copied_bytes = None if copied is None else copied * MIB
    children = [
        process(n, anon=110 * MIB, parent=PID, command=command, copied_bytes=copied_bytes)
        for n in (101, 102, 103)
    ]
    return killed([330 * MIB], processes=(process(anon=0), *children))


def test_copy_on_write_after_a_fork() -> None:
    cause = found(*forked(60))
    assert cause
    assert (cause.name, cause.words) == (
        "copy-on-write",
        "Copy-on-write: 3 forked processes wrote to pages shared with the parent process: 180 MiB of"
        " the 330 MiB that all have together are copies.",
    )


def test_one_forked_process_is_said_without_a_number() -> None:
    result, samples = forked(60)
    assert result.ran
    processes = result.ran.processes[:2]
    cause = found(replace(result, ran=replace(result.ran, processes=processes)), samples)
    assert cause and cause.words.startswith("Copy-on-write: a forked process wrote to pages")


@pytest.mark.parametrize(
    ("copied", "name"), [(0, "growth"), (20 * MIB, "growth"), (200 * MIB, ""), (None, "")]
)
def test_a_forked_process_that_may_have_copied_its_memory_did_not_grow(
    copied: int | None, name: str
) -> None:
    rise = tuple(stack(usage * MIB, "<module> (load.py:9)", pid=101) for usage in (100, 200, 299))
    child = process(101, anon=300 * MIB, parent=PID, copied_bytes=copied)
    # A parent with much memory, so that the copies are no cause of their own.
    processes = (process(anon=600 * MIB), child)
    assert name_of(killed([300 * MIB], processes=processes, stacks=rise)) == name


def test_children_with_memory_of_their_own_copy_nothing() -> None:
    assert found(*forked(0)) is None
    assert found(*forked(None)) is None
    assert found(*forked(60, command="python worker.py")) is None


def test_shared_memory() -> None:
    cause = found(*killed([30 * MIB], shmem=250 * MIB))
    assert cause
    assert cause.name == "shared memory"
    assert cause.words.startswith("250 MiB of the memory is shared memory")
    assert found(*killed([200 * MIB], shmem=100 * MIB)) is None


def test_the_limit_of_a_group_around() -> None:
    result, samples = killed([270 * MIB])
    for limit_of, name in (("/user.slice", "a limit around"), ("machine", None), ("", None)):
        kills = (Kill(PID, "python", is_main=True, limit_of=limit_of),)
        assert result.ran
        cause = found(replace(result, ran=replace(result.ran, kills=kills)), samples)
        assert (cause and cause.name) == name


def test_a_child_that_holds_the_memory() -> None:
    for held, name in ((270 * MIB, "a child"), (160 * MIB, None)):
        processes = (
            process(anon=300 * MIB - held),
            process(101, anon=held, command="/usr/bin/python /srv/worker.py"),
        )
        cause = found(*killed([300 * MIB], processes=processes))
        assert (cause and cause.name) == name
        if cause:
            assert cause.words == (
                "A child process of the command has most of the memory: python worker.py (pid 101) has 270 MiB."
            )


def test_a_process_that_a_killed_parent_left_is_not_the_cause() -> None:
    processes = (
        Process(PID, 1, "python load.py", 0, 1),  # it had ended
        process(101, anon=270 * MIB, parent=PID),
    )
    assert found(*killed([300 * MIB], processes=processes)) is None


def at_one_line(*usages: int, frames: tuple[str, ...] = (), code: str = "") -> Any:
    """A process that grew in a step that no sample saw, with readings at one line of it."""
    stacks = tuple(
        stack(usage * MIB, *frames, "Log.add (load.py:5)", "<module> (load.py:9)", code=code)
        for usage in usages
    )
    return killed(sizes(10, usages[-1]), stacks=stacks)


def test_a_growth_that_three_readings_found_at_one_line() -> None:
    cause = found(*at_one_line(100, 150, 250))
    assert cause
    assert cause.name == "growth"
    assert cause.words == "Anonymous memory grew from 100 MiB to 250 MiB in 0.2 s."


@pytest.mark.parametrize(
    "case",
    [
        at_one_line(100, 250),  # two readings
        at_one_line(203, 220, 250),  # by 47 MiB
        at_one_line(100, 150, 250, code="parameter.fill_(0.02)"),
        at_one_line(100, 150, 250, code="self.layers[0].weight.normal_(0, 1)"),
        at_one_line(100, 150, 250, frames=(f"step ({TORCH}/optim/adamw.py:243)",)),
        at_one_line(100, 150, 250, frames=("read_array (/v/site-packages/numpy/lib/format.py:8)",)),
        at_one_line(100, 150, 250, frames=(f"_run ({TORCH}/autograd/graph.py:841)",)),
        at_one_line(100, 150, 250, frames=(f"constant_ ({TORCH}/nn/init.py:165)",)),
    ],
)
def test_what_is_filled_or_kept_by_a_library_is_no_growth_of_the_line(case: Any) -> None:
    assert found(*case) is None


def cached(held: int) -> tuple[Result, list[Sample]]:
    """A command that lived at its limit of 300 MiB."""
    samples = [
        replace(samples_of([held])[0], cgroup_bytes=300 * MIB, cgroup_file_bytes=300 * MIB - held)
    ]
    result = made(
        limit=300 * MIB,
        needed=held,
        peaks=Peaks(cgroup_bytes=300 * MIB),
        at_peak=samples[0],
    )
    return result, samples


def test_a_record_without_the_kinds_at_its_peak_has_them_from_its_samples() -> None:
    result, samples = converting("model.half()", sizes(100, 300, 420))
    samples += samples_of([100 * MIB], step_ns=SECOND_NS)
    assert result.ran
    ran = replace(result.ran, at_peak=None, peak_ns=samples[2].t_ns, needed_bytes=420 * MIB)
    ran = replace(ran, processes=(replace(ran.processes[0], anon_bytes=100 * MIB),))
    assert name_of((replace(result, ran=ran), samples)) == "dtype conversion"


def test_page_cache_alone() -> None:
    cause = found(*cached(10 * MIB))
    assert cause
    assert (cause.name, cause.words) == (
        "page cache only",
        "290 MiB of the peak of 300 MiB is page cache, which the kernel reclaims under a lower limit.",
    )
    assert found(*cached(200 * MIB)) is None
    result, samples = cached(10 * MIB)
    assert found(replace(result, outcome=Outcome.OOM_KILLED), samples) is None


def test_the_more_specific_of_two_causes_is_said() -> None:
    result, samples = loading()
    kills = (Kill(PID, "python", is_main=True, limit_of="/user.slice"),)
    cause = found(replace(result, ran=replace(result.ran, kills=kills)), samples)
    assert cause
    assert cause.name == "two copies"


def test_a_small_command_and_a_record_without_evidence_have_no_cause() -> None:
    assert found(made(), []) is None
    assert found(*killed([20 * MIB], stacks=(stack(20 * MIB, *LOADS),))) is None


def name_of(case: tuple[Result, list[Sample]]) -> str:
    """Return the name of a command's cause; empty if there is none."""
    cause = found(*case)
    return cause.name if cause else ""


@pytest.mark.parametrize(("limit", "ram"), [(600 * MIB, " --ram 600MiB"), (None, "")])
def test_the_command_to_type_has_the_limit_of_the_command(limit: int | None, ram: str) -> None:
    result, samples = loading()
    result = replace(result, cell=replace(result.cell, ram_limit_bytes=limit))
    cause = found(result, samples)
    assert cause and cause.hint.endswith(f"weighin recommend '/data/my weights.pt'{ram}")
