"""Run one cell: ``python -m weighin.worker FOLDER`` reads its job in the folder, and reports to the socket there. What
it imports before torch adds to the figures, so that even pathlib, which takes 1 MiB, is imported after torch.
"""

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from weighin.child_process import Tail, module
from weighin.result import Outcome
from weighin.stream.pretrained_library import library_of, module_of
from weighin.text import one_line
from weighin.worker.phases import BEFORE_LOAD, Marks, describe

if TYPE_CHECKING:
    from weighin.worker.steps import Worker


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it leaves no child to wait for
    folder, *ranks = sys.argv[1:]
    marks = Marks(folder, *map(int, ranks))
    job = marks.job
    if job.cell.ranks > 1 and job.rank is None:
        start_ranks(marks)
    if job.body:
        from weighin.worker.pytest_body import run_body

        run_body(marks, job.body)
    try:
        worker = prepare(marks)
    except Exception as error:
        marks.fail(Outcome.MEASUREMENT_FAILED, f"{BEFORE_LOAD}: {describe(error)}")
    try:
        if job.cell.operation == "save":
            worker.save()
        else:
            worker.load()
    except BaseException as error:
        marks.fail(*classify(error, job.strategy_path, worker.use))
    os._exit(0)  # skip the interpreter's shutdown, which takes time


def prepare(marks: Marks) -> "Worker":
    """Import torch and the model's code, and report the memory before the load."""
    model = marks.job.cell.model
    import_start_ns = time.monotonic_ns()
    with marks.phase("import"):
        import torch  # noqa: F401
    import_ns = time.monotonic_ns() - import_start_ns
    # Packages such as transformers import a module only when a class in it is first used.
    if library := library_of(model.builder):
        with marks.phase(f"import {library.name}"):
            module_of(library.builder).import_class(model.kwargs)
    with marks.phase("prepare"):
        from weighin.worker.steps import Worker

        worker = Worker(marks)
    marks.report_baseline(import_ns)
    return worker


def classify(error: BaseException, strategy: str, use: str = "") -> tuple[Outcome, str]:
    """Return an error's outcome and message. ``use`` names the use, such as training, if one had begun."""
    from weighin.worker.cuda import is_out_of_memory
    from weighin.worker.verify import WrongWeights

    if isinstance(error, WrongWeights):
        return Outcome.WRONG_WEIGHTS, str(error)
    cause: BaseException | None = error
    while cause:  # a library's error may have been put into words
        if is_out_of_memory(cause):
            return Outcome.CUDA_OOM, one_line(str(cause))
        cause = cause.__cause__
    if use:
        return Outcome.USE_FAILED, f"{use}: {describe(error)}"
    return Outcome.STRATEGY_FAILED, describe(error, strategy)


def start_ranks(marks: Marks) -> NoReturn:
    """Run all ranks of a cell (processes that load one model), report each one's end, and then end. This process replaces
    torchrun, which would import torch into the cell's cgroup, and end all ranks before weighin can see which rank the
    kernel killed. If a rank fails, weighin kills this process; each rank has asked the kernel to end with it.
    """
    import socket
    import subprocess

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, running = marks.job.cell.ranks, {}
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | os.environ
    variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}  # as torchrun does
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for rank in range(ranks):
        try:
            process = subprocess.Popen(
                module("weighin.worker", marks.folder, str(rank)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
        except OSError as error:  # as where a limit of processes is reached: the others would wait
            print(f"cannot start rank {rank}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        assert process.stdout
        running[process.pid] = rank, process, Tail(os.dup(process.stdout.fileno()))
    while running:
        pid, status = os.wait()
        if pid not in running:  # an orphan, if this process is the first of its PID namespace
            continue
        rank, process, printed = running.pop(pid)
        code = process.returncode = os.waitstatus_to_exitcode(status)
        how = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": -code}
        tail = printed.text[-4096:].decode(errors="replace")
        marks.send("ended", rank=rank, **how, stderr_tail=tail)
    os._exit(0)


if __name__ == "__main__":
    main()
