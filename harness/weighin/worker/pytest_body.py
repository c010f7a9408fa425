"""Run a test's body, or a function, and measure it, for weighin's pytest plugin.

The baseline is after the setup of the test's fixtures, just before the body. The worker first returns freed
memory to the kernel, because a body that reuses freed memory would not raise the peak.
"""

import ctypes
import gc
import json
import os
import pickle
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from weighin.cell import BODY_PLUGIN, Body
from weighin.result import Outcome
from weighin.worker.phases import Marks, describe

_BODY = "body"  # the phase of the parts of a test's body that are in no other phase


def run_body(marks: Marks, body: Body) -> NoReturn:
    """Run the body, send its outcome and its phases to weighin, and end this process."""
    start_ns = time.monotonic_ns()
    with marks.phase("import"):
        import torch  # noqa: F401 (torch is part of every body's baseline)
    import_ns = time.monotonic_ns() - start_ns
    sys.path += [folder for folder in marks.job.python_path if folder not in sys.path]
    fault = ""
    try:
        if body.pytest_arguments:
            fault = _run_test(body, marks, import_ns)
        else:
            with open(body.path, "rb") as file:  # noqa: PTH123 (a worker avoids pathlib)
                function, arguments, keywords = pickle.load(file)  # noqa: S301 (of the parent)
            with _measured(marks, import_ns):
                function(*arguments, **keywords)
    except BaseException as error:
        marks.fail(Outcome.STRATEGY_FAILED, describe(error))
    if fault:
        marks.send("told", outcome=Outcome.STRATEGY_FAILED, message=fault)
    else:
        marks.send("done", first_use_ns=None, marks_ns=marks.spent_ns)
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def _measured(marks: Marks, import_ns: int) -> Iterator[None]:
    """Report the memory before the test's body, run the body, and end the body's last phase."""
    marks.is_over = False  # a test that failed may run again
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if (device := marks.job.cell.device).startswith("cuda"):
        import torch

        from weighin.worker.cuda import CudaMemory

        marks.cuda = CudaMemory(torch.device(device))
    marks.close("prepare")
    marks.report_baseline(import_ns)
    marks.restart()
    marks.send("told", phase=_BODY)
    start_ns = marks.clock_ns()
    try:
        yield
    finally:
        load_ns = marks.clock_ns() - start_ns
        marks.close(_BODY)
        marks.send("ready", load_ns=load_ns, ready_at_ns=time.monotonic_ns(), touch_ns=0)
        marks.is_over = True


def _run_test(body: Body, marks: Marks, import_ns: int) -> str:
    """Run pytest on the body's test, and write its reports; return what is wrong, or an empty text."""
    import pytest

    reports: list[dict[str, Any]] = []

    class Plugin:
        """Measures only the test's call, and collects reports for the pytest outside the worker."""

        def pytest_configure(self, config: pytest.Config) -> None:
            config.pluginmanager.register(marks, BODY_PLUGIN)
            self.config = config

        @pytest.hookimpl(wrapper=True, trylast=True)
        def pytest_runtest_call(self) -> Generator[None, object, object]:
            with _measured(marks, import_ns):
                return (yield)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            hook = self.config.hook.pytest_report_to_serializable
            reports.append(hook(config=self.config, report=report))

    os.environ.pop("PYTEST_ADDOPTS", None)
    code = pytest.main(list(body.pytest_arguments), plugins=[Plugin()])
    with open(body.path, "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(reports, file, default=str)
    if failed := [report["when"] for report in reports if report["outcome"] == "failed"]:
        return f"the test failed in its {failed[0]} stage"
    # KeyboardInterrupt and pytest.exit end pytest before it reports the test's call.
    is_whole = any(each["when"] == "call" or each["outcome"] != "passed" for each in reports)
    ended = f"pytest in the test's process ended with exit code {int(code)}"
    return "" if is_whole and not code else ended
