"""Run a test's body, or a function, and measure it, for weighin's pytest plugin.

The baseline is measured just before the body, when torch, pytest and the test's fixtures are
loaded, so that peaks above the baseline belong to the body. Before that, freed memory is returned
to the kernel; otherwise the body could use freed memory without raising the peak.
"""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from weighin.cell import Body, Job
from weighin.protocol import BODY_PLUGIN
from weighin.result import Outcome
from weighin.worker.connection import Lifeline
from weighin.worker.failures import describe, fail
from weighin.worker.phases import Marks
from weighin.worker.warmup import report_baseline

BODY = "body"
"""The name of the phase that covers the parts of a body outside its own phases."""


class BodyMeasurement:
    """Measures a body: its baseline, its phases and its time."""

    def __init__(self, job: Job, lifeline: Lifeline, marks: Marks, import_ns: int) -> None:
        self.marks = marks
        self._lifeline = lifeline
        self._job = job
        self._import_ns = import_ns

    @contextmanager
    def running(self) -> Iterator[None]:
        """Report the baseline, run the body, and end its last phase, even if the body raises."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        if (device := self._job.cell.device).startswith("cuda"):
            import torch

            from weighin.worker.cuda import CudaMemory

            self.marks.cuda = CudaMemory(torch.device(device))
        self.marks.close("prepare")
        report_baseline(self._lifeline, self.marks, self._import_ns)
        self.marks.restart()
        self._lifeline.send("begin", name=BODY, t_ns=time.monotonic_ns())
        start_ns, marked_ns = time.monotonic_ns(), self.marks.spent_ns
        try:
            yield
        finally:
            load_ns = time.monotonic_ns() - start_ns - (self.marks.spent_ns - marked_ns)
            self.marks.close(BODY)
            self._lifeline.send("loaded", load_ns=load_ns)
            self._lifeline.send("ready", t_ns=time.monotonic_ns(), touch_ns=0)


def run_body(job: Job, body: Body, lifeline: Lifeline, marks: Marks) -> NoReturn:
    """Run the body, send its outcome and its phases to the parent, and end this process."""
    start_ns = time.monotonic_ns()
    with marks.phase("import"):
        import torch  # noqa: F401 (torch is part of every body's baseline)
    import_ns = time.monotonic_ns() - start_ns
    sys.path += [folder for folder in job.python_path if folder not in sys.path]
    measured = BodyMeasurement(job, lifeline, marks, import_ns)
    try:
        message = _run_test(body, measured) if body.pytest_arguments else _call(body, measured)
    except BaseException as error:
        fail(lifeline, Outcome.STRATEGY_FAILED, describe(error))
    if message:
        lifeline.send("failed", outcome=Outcome.STRATEGY_FAILED, message=message)
    else:
        lifeline.send("done", first_use_ns=None, marks_ns=marks.spent_ns)
    sys.stderr.flush()
    os._exit(0)


def _run_test(body: Body, measured: BodyMeasurement) -> str:
    """Run pytest on the body's test; return a message if the test failed, else an empty string."""
    import pytest

    reports: list[Any] = []

    class Plugin:
        """Measures only the call of the test, and collects reports for the parent's pytest."""

        def pytest_configure(self, config: pytest.Config) -> None:
            config.pluginmanager.register(measured.marks, BODY_PLUGIN)
            self.config = config

        @pytest.hookimpl(wrapper=True, trylast=True)
        def pytest_pyfunc_call(self) -> Generator[None, object, object]:
            with measured.running():
                return (yield)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            hook = self.config.hook.pytest_report_to_serializable
            reports.append(hook(config=self.config, report=report))

    os.environ.pop("PYTEST_ADDOPTS", None)
    code = pytest.main(list(body.pytest_arguments), plugins=[Plugin()])
    with open(body.path, "w", encoding="utf-8") as file:  # noqa: PTH123 (a worker avoids pathlib)
        json.dump(reports, file, default=str)
    failed = [report["when"] for report in reports if report["outcome"] == "failed"]
    if failed:
        return f"the test failed in its {failed[0]} stage"
    return "" if reports else f"pytest ended with exit code {int(code)}"


def _call(body: Body, measured: BodyMeasurement) -> str:
    import pickle

    with open(body.path, "rb") as file:  # noqa: PTH123
        function, arguments, keywords = pickle.load(file)  # noqa: S301 (the parent just wrote it)
    with measured.running():
        function(*arguments, **keywords)
    return ""
