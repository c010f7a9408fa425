"""The pytest plugin: the ``weighin`` fixture, and ``limit_peak``, a marker and an ini option (docs/ci.md).

Every run of pytest imports weighin.testing.plugin, if weighin is installed beside pytest. Until a
test uses the fixture or the marker, the plugin therefore imports no other module of weighin.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from weighin.result import Result

MARKER = "limit_peak"

MEASURED = pytest.StashKey[list["Result"]]()
"""What a test has measured: if the test fails, its report shows the phases."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weighin", "memory of loading")
    group.addoption(
        "--weighin-isolation",
        choices=("auto", "docker", "cgroup", "process"),
        help="isolation of measured processes; default: the ini option weighin_isolation, or auto",
    )
    parser.addini("weighin_isolation", "isolation of measured processes", default="auto")
    parser.addini(
        MARKER,
        "how much the memory of each test may grow, such as 2GiB: each test then runs in a new process;"
        " the marker limit_peak of a test replaces it",
        default="",
    )
    parser.addini(
        "weighin_body_args",
        "arguments of the pytest that runs a test with limit_peak; that pytest ignores addopts",
        type="args",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f'{MARKER}(size, metric="rss", ram=None, timeout_s=600): run the test function in a new process,'
        " and fail if its memory grows by more than size;"
        " metric: rss, anon, cgroup or cuda; ram: a limit that the kernel enforces",
    )


class Weighin:
    """The fixture ``weighin``, which measures loads and functions in new processes."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._config = request.config
        self._results = request.node.stash.setdefault(MEASURED, [])

    def measure(
        self,
        what: str | Callable[..., object],
        *arguments: Any,
        ram: str | None = None,
        isolation: str | None = None,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> Result:
        """Measure one load, or one call of a function, and return its ``Result``.

        Args:
            what: a strategy's name or file ("./mine.py"), or a function of an importable module.
            arguments: the function's arguments; a strategy takes no arguments.
            ram: a RAM limit such as "2g", which needs the isolation docker or cgroup.
            isolation: "docker", "cgroup", "process" or "auto"; a function cannot run in Docker.
            timeout_s: the time in seconds after which the process is killed (outcome ``timeout``).
            options: the keyword arguments of a function. For a strategy: ``model`` ("gpt2-small"),
                ``device``, ``dtype``, ``cache``, ``format``, ``checkpoint``, ``kwargs`` of the
                model, ``options`` of the strategy, and ``use`` after the load ("adamw",
                "./mine.py"; default "forward"). For a Hugging Face folder also: ``variant``,
                ``model_class``, ``revision`` and ``trust_remote_code``.

        Raises:
            HarnessError: the load or function cannot be measured. A load or function that fails
                raises no error: its result has the outcome and the message of the failure. Reading
                the peaks of such a result raises AssertionError, so that the test fails.
            TypeError: a strategy got positional arguments.
        """
        from weighin.testing import bodies

        chosen = isolation or bodies.isolation_of(self._config)
        limit = bodies.Limit("1", ram=ram, timeout_s=timeout_s)
        result = bodies.measured(what, arguments, options, limit, chosen)
        self._results.append(result)
        return bodies.guarded(result)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure the ``with`` block as a phase; without a limit of ``limit_peak``, do nothing."""
        from weighin.cell import BODY_PLUGIN
        from weighin.worker.phases import named_by_strategy

        body = self._config.pluginmanager.getplugin(BODY_PLUGIN)
        return body.phase(named_by_strategy(name)) if body else nullcontext()


@pytest.fixture
def weighin(request: pytest.FixtureRequest) -> Weighin:
    """Measure loads in new, limited processes: ``weighin.measure("mmap_assign", ram="2g")``."""
    return Weighin(request)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test that has a limit in a new process, and report its result."""
    marker, size = item.get_closest_marker(MARKER), item.config.getini(MARKER)
    if marker is None and not (size and isinstance(item, pytest.Function)):  # not for a doctest
        return None
    from weighin.cell import BODY_PLUGIN
    from weighin.testing import bodies

    if item.config.pluginmanager.has_plugin(BODY_PLUGIN):
        return None  # this process is the new process
    limit = bodies.Limit(*marker.args, **marker.kwargs) if marker else bodies.Limit(size)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in bodies.run_item(item, limit):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # Tear down the fixtures of earlier tests, as the usual protocol does.
    item.session._setupstate.teardown_exact(nextitem)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add a table of the phases of each measurement to the report of a failed test."""
    report = yield
    if report.failed and (results := item.stash.get(MEASURED, [])):
        from weighin.testing.bodies import section

        report.sections += map(section, results)
    return report
