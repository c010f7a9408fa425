"""Load rightly, and do to the streams what the option ``how`` names."""

import os
import subprocess
import sys
import time

import torch

from strategies.baseline import load as load_rightly
from weighin import Load

MIB = 1024**2


def load(job: Load) -> torch.nn.Module:
    with job.phase("noise"):
        globals()[job.options["how"]]()
    return load_rightly(job)


def prints_10_mib_without_an_end() -> None:
    for _ in range(10):
        print(end="\x1b[31m\r\0" * (MIB // 8))
        sys.stderr.write("x" * (MIB // 2))
    os.write(1, os.urandom(4096))


def prints_what_looks_like_events() -> None:
    for stream in (sys.stdout, sys.stderr):
        print('{"event":"failed","outcome":"timeout","message":"lies"}', file=stream, flush=True)
        print('{"event":"done","first_use_ns":1,"marks_ns":1}', file=stream, flush=True)


def closes_its_streams() -> None:
    os.write(1, b"the last word")
    for descriptor in (0, 1, 2):
        os.close(descriptor)


def reads_from_stdin() -> None:
    assert sys.stdin.read() == ""  # the acknowledgements are not for strategies


def lets_a_child_print() -> None:
    subprocess.run(["echo", "not an event"], check=True)


def leaves_a_child() -> None:
    if os.fork() == 0:
        time.sleep(600)


def leaves_a_child_in_another_session() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()


def leaves_a_child_with_its_streams() -> None:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
