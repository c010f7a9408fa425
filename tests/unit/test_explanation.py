"""The words at the end of a command's run, for each way to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from factories import make_result
from ran_commands import PID, made, process, samples_of, stack
from snapshots import Compare

from weighin.records.explanation import answer, explain
from weighin.result import Kill, Mark, OpenFile, Outcome, Peaks, Result, Stack
from weighin.units import GIB, MIB

MODULE = "/v/lib/python3.11/site-packages/torch/nn/modules/module.py"
LIBRARY = "/v/lib/python3.11/site-packages/x.py"
PYTHON = "/usr/lib/python3.11"


def failed(message: str, outcome: Outcome = Outcome.COMMAND_FAILED) -> Result:
    return made(outcome, message=message)


def killed(*stacks: Stack, **ran: Any) -> Result:
    """A command that its own limit of 600 MiB killed."""
    return made(
        Outcome.OOM_KILLED,
        limit=600 * MIB,
        needed=598 * MIB,
        peaks=Peaks(cgroup_bytes=600 * MIB, file_sampled_bytes=0),
        kills=(Kill(PID, "python", is_main=True),),
        processes=(process(anon=597 * MIB),),
        survived=False,
        stacks=stacks,
        **ran,
    )


def at(*frames: str, usage: int = 590, thread: str = "MainThread") -> Stack:
    return replace(stack(usage * MIB, *frames), thread=thread)


def reading(cgroup: int, cached: int, limit: int | None = 4 * GIB, **ran: Any) -> Result:
    """A command that needed 531 MiB and read a file."""
    weights = OpenFile("/data/weights.pt", 300 * MIB, 300 * MIB)
    return made(
        limit=limit,
        needed=531 * MIB,
        peaks=Peaks(cgroup_bytes=cgroup * MIB, file_sampled_bytes=cached * MIB),
        processes=(process(anon=531 * MIB, files=(weights,)),),
        **ran,
    )


def at_its_limit() -> Result:
    return made(
        limit=300 * MIB,
        needed=12 * MIB,
        needed_is_sampled=False,
        peaks=Peaks(cgroup_bytes=300 * MIB),
        processes=(process(anon=12 * MIB),),
    )


WAITS = at(f"wait ({PYTHON}/threading.py:320)", "<module> (/s.py:9)")
WORKS = at("work (/s.py:4)", thread="worker")
COPIES = at(f"copy ({LIBRARY}:3)")
HOOK = at(
    f"free ({LIBRARY}:3)", f"_exit_function ({PYTHON}/multiprocessing/util.py:360)", usage=597
)
MARKS = (Mark(1, "epoch 1"), Mark(2, "epoch 2"), Mark(9_000_000_000, "done"))

CASES = {
    "another process sent it": failed(
        "killed by SIGKILL, not for lack of memory: 400 MiB of its limit were never used, so another process sent SIGKILL"
    ),
    "by a signal": failed("ended by SIGTERM"),
    "exit code": failed("exit code 3"),
    "timeout": failed("still running after 10 s", Outcome.TIMEOUT),
    "skipped": made(Outcome.SKIPPED),
    "nothing was seen": made(),
    "nothing was seen, but a limit": replace(make_result(), ran=None),
    "nothing but a need": made(needed=5 * MIB),
    "processes that were left": made(ended=("/usr/bin/sleep 9", "sh", "cat", "tee")),
    "page cache of a cold file": reading(914, 383, cold=("/data/weights.pt",)),
    "page cache of a warm file": reading(914, 383),
    "page cache that others have": reading(531, 0, limit=None),
    "a peak at the limit": at_its_limit(),
    "without a cgroup": made(needed=20 * MIB, processes=(process(anon=10 * MIB, shmem=10 * MIB),)),
    "the program's own line, and the function that it called": killed(
        at(f"_load_from_state_dict ({MODULE}:2430)", f"load_state_dict ({MODULE}:2600)", "<module> (/home/me/script.py:14)")
    ),
    "a lambda": killed(at("A.f.<locals>.<lambda> (/s.py:9)", "<module> (/s.py:20)")),
    "a script": killed(at("<module> (/s.py:9)")),
    "only a library": killed(at("load (/usr/lib/python3/dist-packages/vllm/a.py:3)")),
    "python -m": killed(at("<module> (/app/tool/__main__.py:3)")),
    "a thread that waits": killed(WAITS, WORKS),
    "a thread that waits, and one in a library": killed(COPIES, WAITS, WORKS),
    "a library's hook after the end": killed(at("work (/s.py:4)"), HOOK),
    "all wait for a connection": killed(at(f"Connection._recv ({PYTHON}/multiprocessing/connection.py:378)")),
    "all wait for a thread": killed(at(f"Thread.join ({PYTHON}/threading.py:1112)")),
    "all sleep": killed(at("sleep (load.py:3)")),
    "no stack, but a mark": killed(marks=MARKS, peak_ns=3),
    "a small command that was not killed": made(needed=40 * MIB, stacks=(at("work (/s.py:4)", usage=39),)),
    "one that is large enough": made(needed=48 * MIB, stacks=(at("work (/s.py:4)", usage=39),)),
}  # fmt: skip


def test_the_words_for_each_end(same: Compare) -> None:
    said = ("\n  ".join([f"{name}:", *explain(result)]) for name, result in CASES.items())
    same("explanations.txt", "\n".join(said) + "\n")


def test_without_its_samples_the_record_splits_the_peak(tmp_path: Path) -> None:
    (at_peak,) = samples_of([90 * MIB], shmem=200 * MIB)
    result = made(needed=290 * MIB, at_peak=at_peak, samples_path="samples/gone.csv")
    for path in ("samples/gone.csv", "../x.csv", None):
        assert "(90 MiB and 200 MiB)" in answer(tmp_path, replace(result, samples_path=path))[1]
