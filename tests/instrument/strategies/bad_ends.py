"""End in the way that the option ``how`` names, inside the phase "bad"."""

import ctypes
import os
import signal
import sys
import time

import torch

from weighin import Load


def load(job: Load) -> torch.nn.Module | None:
    with job.phase("good"):
        time.sleep(0.02)
    with job.phase("bad"):
        model: torch.nn.Module | None = globals()[job.options["how"]](job)
    return model


def raises(_: Load) -> None:
    raise ValueError("the shard is broken\n  in two")  # here: raises


def raises_in_torch(_: Load) -> None:
    torch.load("/not/there.pt")  # here: raises_in_torch


def raises_a_novel(_: Load) -> None:
    raise ValueError("word " * 1000)  # here: raises_a_novel


def does_not_fit(job: Load) -> None:
    job.build_model().load_state_dict({"head.bias": torch.ones(1)})  # here: does_not_fit


def nests_phases(job: Load) -> None:
    with job.phase("inner"):  # here: nests_phases
        pass


def exits(_: Load) -> None:
    sys.exit()  # here: exits


def exits_with_a_word(_: Load) -> None:
    sys.exit("enough")  # here: exits_with_a_word


def exits_at_once(_: Load) -> None:
    os._exit(3)


def exits_at_once_as_if_all_were_well(_: Load) -> None:
    os._exit(0)


def exits_after_a_word(_: Load) -> None:
    os.write(2, b"first\r\n\x1b[31mcannot\x00 go on\x1b[0m \xff" + b"!" * 5000 + b"\n\n")
    os._exit(4)


def segfaults(_: Load) -> None:
    ctypes.string_at(0)


def kills_itself(_: Load) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def returns_none(_: Load) -> None:
    return None


def returns_a_state_dict(_: Load) -> dict[str, torch.Tensor]:
    return {}


def sleeps(_: Load) -> None:
    time.sleep(600)


def hangs_with_the_gil_held(_: Load) -> None:
    ctypes.PyDLL(None).sleep(600)


def leaves_a_child_and_kills_itself(_: Load) -> None:
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    os.setsid()
    time.sleep(600)
