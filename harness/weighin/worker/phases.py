"""Report phases and failures to weighin. At the end of a phase the worker reads and resets VmHWM, its peak RSS, and
waits until weighin has read and reset the cgroup's peak. The load time does not include the time of these readings.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any, NoReturn

from weighin import phase_reporter
from weighin.cell import Job, decode_job
from weighin.child_process import ORPHANED, end_with_parent
from weighin.phase_reporter import AWAITED
from weighin.result import OURS, UNNAMED, Outcome
from weighin.text import one_line

if TYPE_CHECKING:
    from weighin.worker.cuda import CudaMemory

# A gap between two phases counts to the second phase if this process ran for less than 1 ms in it, unless it
# waited for long; on a busy machine, any gap may take a few ms.
_SHORTEST_GAP_NS, _LONG_GAP_NS = 1_000_000, 100_000_000
_PIECE = 1000  # the most points in one message
BEFORE_LOAD = "before the load"  # so begins the message of a failure that is not the strategy's


def named_by_strategy(name: object) -> str:
    """Return a phase's name, unless it is malformed or one of weighin's own."""
    pattern = r"[A-Za-z0-9][A-Za-z0-9 _.+/()-]{0,63}"
    if isinstance(name, str) and re.fullmatch(pattern, name) and name not in OURS:
        return name
    why = "use 1 to 64 of A-Z a-z 0-9 space _ . + / ( ) -, beginning with a letter or a digit"
    if isinstance(name, str) and name in OURS:
        why = "weighin itself has a phase of this name; use another name"
    raise ValueError(f"phase {short_repr(name)}: {why}")


class Marks:
    """A worker's report to weighin; ``folder`` has its job and weighin's socket. When weighin ends, a signal ends the
    worker, even inside a long call of C; in a container, the engine sends the signal.
    """

    def __init__(self, folder: str, rank: int | None = None) -> None:
        self.folder = folder
        job = decode_job(phase_reporter.read_text(f"{folder}/{phase_reporter.JOB}"))
        self.job: Job = replace(job, rank=rank)
        end_with_parent(job.parent if rank is None else 0)
        self.spent_ns = 0  # at the ends of phases
        self.is_over = False  # a phase at the end of a test's fixture is none of the test
        self.cuda: CudaMemory | None = None
        self._connection = phase_reporter.Connection(f"{folder}/{phase_reporter.SOCKET}")
        self._lock = threading.Lock()
        self._current: str | None = None
        self.restart()
        if rank is not None:
            self.send("told", rank=rank)

    def send(self, event: str, **fields: Any) -> None:
        """Send a message; if it is in ``AWAITED``, return when weighin has answered."""
        try:
            with self._lock:
                self._connection.send({"event": event, **fields}, wait=event in AWAITED)
        except OSError:  # weighin has ended
            sys.stderr.flush()
            os._exit(ORPHANED)

    def fail(self, outcome: Outcome, message: str) -> NoReturn:
        """Report the failure, print the traceback of its error to standard error, and end this process."""
        import traceback

        if sys.exc_info()[0]:
            traceback.print_exc()
        summary = self.cuda.summary() if self.cuda and outcome is Outcome.CUDA_OOM else ""
        self.send("told", outcome=outcome, message=message[:8000], summary=summary)  # of one packet
        sys.stderr.flush()
        os._exit(1)  # do not wait for the strategy's threads and exit handlers

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body of the ``with`` statement as a phase of this name."""
        if self.is_over:
            yield
            return
        if self._current is not None:
            raise RuntimeError(
                f"phase {name!r} begins before {self._current!r} has ended; phases cannot be nested"
            )
        self.flush()
        self._current = name
        self.send("told", phase=name)
        try:
            yield
        finally:
            self._current = None
            self.close(name)

    def flush(self) -> None:
        """Report the time since the last phase as phase "other", unless that is a short gap; refuse an open phase."""
        if self._current is not None:
            raise RuntimeError(f"phase {self._current!r} began and never ended")
        ran_ns = time.process_time_ns() - self._start_cpu_ns
        if ran_ns >= _SHORTEST_GAP_NS or time.monotonic_ns() - self._start_ns >= _LONG_GAP_NS:
            self.close(UNNAMED)

    def clock_ns(self) -> int:
        """Return the time on a clock that stands still between phases."""
        return time.monotonic_ns() - self.spent_ns

    def restart(self) -> None:
        """Let the next phase start now, so that it does not include weighin's own work before now."""
        self._faults = phase_reporter.parse_faults(phase_reporter.read_text("/proc/self/stat"))
        self._start_ns, self._start_cpu_ns = time.monotonic_ns(), time.process_time_ns()

    def read(self) -> dict[str, Any]:
        figures = phase_reporter.read_figures()
        if self.cuda:
            figures["memory"]["cuda_allocated_bytes"] = self.cuda.allocated()
        return figures

    def close(self, name: str) -> None:
        """Report the time since the last phase as a phase of the given name, however short."""
        if self.is_over:
            return
        if self.cuda:
            self.cuda.synchronize()
        end_ns, figures, peaks = time.monotonic_ns(), self.read(), dict[str, int | None]()
        if self.cuda:
            peaks, points = self.cuda.peaks(), self.cuda.take_timeline()
            for start in range(0, len(points), _PIECE):
                self.send("told", points=points[start : start + _PIECE])
        minor, major = figures["faults"]
        self.send(
            "phase",
            name=name,
            start_ns=self._start_ns,
            end_ns=end_ns,
            peak_rss_bytes=figures["peak_rss_bytes"],
            end=figures["memory"],
            minor_faults=minor - self._faults[0],
            major_faults=major - self._faults[1],
            **peaks,
        )
        if self.cuda:
            self.cuda.reset()
        phase_reporter.reset_peak()
        self.restart()
        self.spent_ns += self._start_ns - end_ns

    def report_baseline(self, import_ns: int) -> None:
        """Send the memory before the load, and what only the worker can see of its environment."""
        import torch

        environment = {
            "python": sys.version.split()[0],
            "torch": str(torch.__version__),
            "numpy": getattr(sys.modules.get("numpy"), "__version__", None),
            "threads": torch.get_num_threads(),
            "libc": os.confstr("CS_GNU_LIBC_VERSION"),
        }
        self.send(
            "baseline",
            baseline_ns=time.monotonic_ns(),
            baseline=self.read()["memory"],
            import_ns=import_ns,
            environment=environment | (self.cuda.describe() if self.cuda else {}),
            notes=self.cuda.notes() if self.cuda else [],
        )


def describe(error: BaseException, strategy: str = "") -> str:
    """Describe an error in one line, with the line of code that raised it, of the file ``strategy`` if it can be."""
    import traceback  # 0.1 MiB before torch, which imports it

    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == strategy]
    place = "".join(f" ({os.path.basename(f.filename)}:{f.lineno})" for f in (own or frames)[-1:])  # noqa: PTH119
    text = one_line(str(error))
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"
