"""Each rule of the table of causes: a record for which it holds, and one for which it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ran_commands import PID, SECOND_NS, made, process, samples_of, stack
from snapshots import Compare

from weighin.records.explanation import Facts
from weighin.result import Kill, OpenFile, Outcome, Peaks, Process, Result, Sample, Stack
from weighin.units import MIB

Case = tuple[Result, list[Sample]]

TORCH = "/v/lib/python3.11/site-packages/torch"
INIT = f"constant_ ({TORCH}/nn/init.py:165)"
LINEAR = f"Linear.reset_parameters ({TORCH}/nn/modules/linear.py:120)"
LOADS = (
    f"_load_from_state_dict ({TORCH}/nn/modules/module.py:2430)",
    f"Module.load_state_dict ({TORCH}/nn/modules/module.py:2600)",
    "<module> (load.py:14)",
)
READS = (f"load_tensor ({TORCH}/serialization.py:1200)", "<module> (load.py:13)")
IMPORTS = (
    "<listcomp> (parts/tables.py:3)", "<module> (parts/tables.py:3)",
    "_call_with_frames_removed (<frozen importlib._bootstrap>:241)",
    "exec_module (<frozen importlib._bootstrap_external>:940)", "<module> (load.py:3)",
)  # fmt: skip
PARSES = (
    "load (/usr/lib/python3.11/json/__init__.py:293)",
    "read (load.py:9)",
    "main (load.py:20)",
)
WEIGHTS = OpenFile("/data/my weights.pt", 256 * MIB, 256 * MIB, is_open=False, seen_ns=100_000_000)
BIG = OpenFile("/data/big.bin", 600 * MIB, 0, seen_ns=100_000_000)
CLOSED = replace(BIG, size_bytes=340 * MIB, position_bytes=340 * MIB, is_open=False)
TWO_COPIES = (100, 300, 540)
"""The anonymous memory of a process that reads 256 MiB and copies most of it, in MiB."""


def killed(
    anon: tuple[int, ...],
    *stacks: Stack,
    shmem: int = 0,
    files: tuple[OpenFile, ...] = (),
    **ran: Any,
) -> Case:
    """A command with this anonymous memory in MiB, until its limit of 600 MiB killed it."""
    samples = samples_of([each * MIB for each in anon], shmem=shmem * MIB)
    held = samples[-1].anon_bytes
    ran = {
        "kills": (Kill(PID, "python", is_main=True),),
        "processes": (process(anon=held, shmem=shmem * MIB, files=files),),
        "stacks": stacks,
    } | ran
    needed = held + shmem * MIB
    result = made(Outcome.OOM_KILLED, limit=600 * MIB, needed=needed, at_peak=samples[-1], **ran)
    return result, samples


def with_ran(case: Case, **changes: Any) -> Case:
    result, samples = case
    assert result.ran
    return replace(result, ran=replace(result.ran, **changes)), samples


def reading(
    file: OpenFile,
    *frames: str,
    anon: tuple[int, ...] = (10, 150, 300),
    at: int = 0,
    code: str = "",
) -> Case:
    """A process with this file, and its stack when it had ``at`` MiB: nearly all, unless given."""
    usage, frames = (at or anon[-1] - 1) * MIB, frames or ("<module> (load.py:7)",)
    return killed(anon, stack(usage, *frames, code=code), files=(file,))


def loading(*files: OpenFile, anon: tuple[int, ...] = TWO_COPIES) -> Case:
    loads = stack((anon[-1] - 1) * MIB, *LOADS)
    return killed(anon, stack(120 * MIB, *READS), loads, files=files)


def model_beside(*anon: int, built_at: int, builds: str = INIT) -> Case:
    """A model that was being built at ``built_at`` MiB, and then a file of 256 MiB is read."""
    late = replace(WEIGHTS, seen_ns=200_000_000)
    built = stack(built_at * MIB, builds, "<module> (load.py:9)")
    return killed(anon, built, stack((anon[-1] - 1) * MIB, *READS), files=(late,))


def converting(code: str, anon: tuple[int, ...] = (100, 300, 420)) -> Case:
    half = replace(WEIGHTS, size_bytes=128 * MIB)
    return reading(half, "<module> (load.py:10)", anon=anon, at=anon[-1], code=code)


def parsing(*frames: str) -> Case:
    rows = OpenFile("/data/rows.json", 60 * MIB, 60 * MIB, seen_ns=100_000_000)
    return reading(rows, *frames, at=290)


def importing(*steps: tuple[int, tuple[str, ...]]) -> Case:
    """Stacks with the memory at each, in MiB."""
    return killed((300,), *(stack(usage * MIB, *frames) for usage, frames in steps))


def forked(copied: int | None, children: int = 3, command: str = "/usr/bin/python load.py") -> Case:
    """Children that hold 110 MiB each, of which ``copied`` MiB each were their parent's."""
    copied_bytes = None if copied is None else copied * MIB
    forks = [
        process(n, anon=110 * MIB, parent=PID, command=command, copied_bytes=copied_bytes)
        for n in range(101, 101 + children)
    ]
    return killed((330,), processes=(process(anon=0), *forks))


def grown_fork(copied: int | None) -> Case:
    """A child that grew, of a parent with much memory, so that the copies are no cause of their own."""
    rise = [stack(usage * MIB, "<module> (load.py:9)", pid=101) for usage in (100, 200, 299)]
    child = process(101, anon=300 * MIB, parent=PID, copied_bytes=copied)
    return killed((300,), *rise, processes=(process(anon=600 * MIB), child))


def child_with(held: int) -> Case:
    child = process(101, anon=held * MIB, command="/usr/bin/python /srv/worker.py")
    return killed((300,), processes=(process(anon=(300 - held) * MIB), child))


def limited_by(case: Case, limit_of: str) -> Case:
    return with_ran(case, kills=(Kill(PID, "python", is_main=True, limit_of=limit_of),))


def at_one_line(*usages: int, frame: str = "", code: str = "") -> Case:
    """A process that grew in a step that no sample saw, with readings at one line of it."""
    frames = (*([frame] if frame else []), "Log.add (load.py:5)", "<module> (load.py:9)")
    stacks = [stack(usage * MIB, *frames, code=code) for usage in usages]
    return killed((10, usages[-1]), *stacks)


def cached(held: int) -> Case:
    """A command that lived at its limit of 300 MiB."""
    (sample,) = samples_of([held * MIB])
    sample = replace(sample, cgroup_bytes=300 * MIB, cgroup_file_bytes=(300 - held) * MIB)
    peaks = Peaks(cgroup_bytes=300 * MIB)
    return made(limit=300 * MIB, needed=held * MIB, peaks=peaks, at_peak=sample), [sample]


def without_kinds() -> Case:
    """A record without the kinds at its peak, which has them from its samples."""
    result, samples = converting("model.half()")
    assert result.ran
    processes = (replace(result.ran.processes[0], anon_bytes=100 * MIB),)
    case = result, samples + samples_of([100 * MIB], step_ns=SECOND_NS)
    return with_ran(
        case, at_peak=None, peak_ns=samples[2].t_ns, needed_bytes=420 * MIB, processes=processes
    )


def without_limit() -> Case:
    result, samples = loading(WEIGHTS)
    return replace(result, cell=replace(result.cell, ram_limit_bytes=None)), samples


BUSY = ("spin (load.py:30)",)
BETWEEN = ("work (load.py:9)", "<module> (load.py:5)")

CASES: dict[str, Case] = {
    "two copies": loading(WEIGHTS),
    "two copies: without a limit the command to type has none": without_limit(),
    "two copies: and a limit around, which is less specific": limited_by(loading(WEIGHTS), "/user.slice"),
    "two copies: a model that was built before the weights were read": model_beside(100, 400, 500, built_at=200, builds=LINEAR),
    "no two copies: the same without a model": reading(replace(WEIGHTS, seen_ns=200_000_000), *READS, anon=(100, 400, 500)),
    "two copies: as much as was read": model_beside(100, 400, 480, built_at=120),
    "no two copies: no checkpoint was read": loading(),
    "no two copies: it is page cache": loading(replace(WEIGHTS, mapped_bytes=256 * MIB)),
    "no two copies: of no checkpoint": loading(replace(WEIGHTS, path="/data/log.txt")),
    "no two copies: grew by less than was read": loading(WEIGHTS, anon=(300, 400, 550)),
    "no two copies: unknown by how much it grew": loading(replace(WEIGHTS, seen_ns=None)),
    "conversion: float": converting("converted[name] = tensor.float()"),
    "conversion: half": converting("model.half()"),
    "conversion: to a dtype": converting("x = x.to(torch.float32)"),
    "conversion: to dtype=": converting("x = x.to(dtype=kind)"),
    "conversion: astype": converting("a = a.astype('f4')"),
    "conversion: of a record without the kinds at its peak": without_kinds(),
    "no conversion: to a device": converting("x = x.to(device)"),
    "no conversion: grew by less": converting("x = x.float()", (300, 400, 420)),
    "no conversion: another call": converting("x = model(x)"),
    "whole file: read()": reading(BIG, at=300, code="text = file.read()"),
    "whole file: read_bytes()": reading(BIG, at=300, code="Path(x).read_bytes()"),
    "whole file: fromfile()": reading(BIG, at=300, code="np.fromfile(f)"),
    # The first sample that found it open was late, so that less than its size is seen to grow.
    "whole file: read to its end before it was closed": reading(CLOSED, at=300, code="text = file.read()"),
    "whole file: a checkpoint": reading(replace(WEIGHTS, position_bytes=100 * MIB, is_open=True), *READS, anon=(100, 150, 250), at=240),
    "whole file: parsed at once": parsing(*PARSES),
    "no whole file: parsed, and then something else with an open file": parsing(*PARSES[1:]),
    "no whole file: a module of the user called json": parsing("load (/srv/json/app.py:9)"),
    "no whole file: a piece": reading(BIG, at=300, code="piece = file.read(4096)"),
    "no whole file: mapped": reading(replace(BIG, mapped_bytes=600 * MIB), at=300, code="text = file.read()"),
    "no whole file: a small one": reading(replace(BIG, size_bytes=64 * MIB), at=300, code="text = file.read()"),
    "no whole file: closed": reading(replace(BIG, is_open=False), at=300, code="text = file.read()"),
    "no whole file: closed before its end": reading(replace(CLOSED, position_bytes=0), at=300, code="text = file.read()"),
    "no whole file: at little memory": reading(replace(BIG, position_bytes=600 * MIB), at=40, code="text = file.read()"),
    "import": importing((30, IMPORTS), (299, IMPORTS)),
    "import: a busy thread beside it": importing((30, IMPORTS), (30, BUSY), (299, IMPORTS), (299, BUSY)),
    "no import: most was there before": importing((30, ("<module> (load.py:2)",)), (299, IMPORTS)),
    # A later import of the same line, once the function that it imported has taken the memory.
    "no import: grew between two": importing((22, IMPORTS), (290, BETWEEN), (295, IMPORTS)),
    "copy-on-write: three": forked(60),
    "copy-on-write: one is said without a number": forked(60, children=1),
    "no copy-on-write: no copies": forked(0),
    "no copy-on-write: not known": forked(None),
    "no copy-on-write: another program": forked(60, command="python worker.py"),
    "shared memory": killed((30,), shmem=250),
    "no shared memory: the smaller part": killed((200,), shmem=100),
    "a limit around": limited_by(killed((270,)), "/user.slice"),
    "no limit around: the machine's": limited_by(killed((270,)), "machine"),
    "no limit around: its own": limited_by(killed((270,)), ""),
    "a child": child_with(270),
    "no child: about half": child_with(160),
    "no child: left by a parent that had ended": killed(
        (300,), processes=(Process(PID, 1, "python load.py", 0, 1), process(101, anon=270 * MIB, parent=PID)),
    ),
    "growth: three readings at one line": at_one_line(100, 150, 250),
    "growth: of a fork that copied nothing": grown_fork(0),
    "growth: of a fork that copied little": grown_fork(20 * MIB),
    "no growth: of a fork that copied": grown_fork(200 * MIB),
    "no growth: of a fork that may have copied": grown_fork(None),
    "no growth: two readings": at_one_line(100, 250),
    "no growth: by 47 MiB": at_one_line(203, 220, 250),
    "no growth: filled": at_one_line(100, 150, 250, code="parameter.fill_(0.02)"),
    "no growth: drawn": at_one_line(100, 150, 250, code="self.layers[0].weight.normal_(0, 1)"),
    "no growth: an optimizer's": at_one_line(100, 150, 250, frame=f"step ({TORCH}/optim/adamw.py:243)"),
    "no growth: numpy's": at_one_line(100, 150, 250, frame="read_array (/v/site-packages/numpy/lib/format.py:8)"),
    "no growth: a graph's": at_one_line(100, 150, 250, frame=f"_run ({TORCH}/autograd/graph.py:841)"),
    "no growth: torch.nn.init's": at_one_line(100, 150, 250, frame=INIT),
    "page cache": cached(10),
    "no page cache: the smaller part": cached(200),
    "no page cache: it was killed": (replace(cached(10)[0], outcome=Outcome.OOM_KILLED), cached(10)[1]),
    "nothing: no evidence": (made(), []),
    "nothing: a small command": killed((20,), stack(20 * MIB, *LOADS)),
}  # fmt: skip


def test_the_cause_of_each_record(same: Compare) -> None:
    text = []
    for name, (result, samples) in CASES.items():
        assert result.ran
        cause = Facts(result, result.ran, samples).cause
        said = [cause.name, cause.words, cause.hint] if cause else ["-"]
        text.append("\n  ".join([f"{name}:", *filter(None, said)]))
    same("causes.txt", "\n".join(text) + "\n")
