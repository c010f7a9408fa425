"""Measure a load for a test, or a test or any function in a new process, with its phases and limits.

The process of a test or function has the isolation ``cgroup`` or ``process``. It cannot run in a
container, because the container lacks the modules that a test imports.
"""

import json
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import pytest

from weighin.cell import FORWARD, Body, Cell, Job, ModelSpec
from weighin.errors import (
    ConfigError,
    HarnessError,
    Interrupted,
    IsolationUnavailable,
    UnknownName,
)
from weighin.isolation import select
from weighin.plan import start as plans
from weighin.plan.task import Progress
from weighin.probes import environment
from weighin.result import Outcome, Result
from weighin.run import runner
from weighin.run.loads import LoadSpec
from weighin.run.measure import measure
from weighin.settings.definition import Settings, check_suite
from weighin.units import format_bytes, format_seconds, parse_bytes

METRICS: Final[dict[str, tuple[str, str]]] = {
    "rss": ("rss_bytes", "rss_bytes"),
    "anon": ("anon_sampled_bytes", "anon_bytes"),
    "cgroup": ("cgroup_bytes", "cgroup_bytes"),
    "cuda": ("cuda_allocated_bytes", "cuda_allocated_bytes"),
}
"""Maps a metric to its fields in ``Peaks`` and in ``Memory``. All but ``anon`` are high-water marks."""

Call = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]
PATIENCE_S: Final = 600.0
"""How many seconds a load waits for other runs to end; xdist runs tests in parallel."""
_OF_LOADS: Final = (
    "device", "dtype", "cache", "format", "checkpoint", "kwargs", "trust_remote_code", "variant",
    "model_class", "revision",
)  # fmt: skip
_FIGURES: Final = ("peaks", "above_import_bytes", "use_phases")
_HEADS: Final = ("phase", "time", "peak RSS", "anonymous at end", "cgroup peak", "CUDA peak")


@dataclass(frozen=True, slots=True)
class Limit:
    """The arguments of the marker ``limit_peak``; a test's memory may grow by at most ``size``."""

    size: str
    metric: str = "rss"
    ram: str | None = None
    timeout_s: float = 600.0
    device: str = "cpu"


class NotOk(Result):
    """A ``Result`` of a failed measurement: to read its peaks raises AssertionError.

    The peaks of a failed load do not show how much memory the load needs. A test that expects a
    failure can read ``outcome``, ``message`` and ``phases``.
    """

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name in _FIGURES:
            __tracebackhide__ = True
            end = f"{self.outcome}: {self.message}" if self.message else self.outcome
            raise AssertionError(
                f"{name} cannot be read, because {self.cell.strategy} did not end ok: {end}\nthe"
                " peaks of such a load are incomplete: if the outcome is intended, assert"
                ' run.outcome == "..." and read no peaks'
            )
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        """Return a short text, which pytest prints when an assertion on the outcome fails."""
        return f"<result of {self.cell.strategy}: {self.outcome}>"


def guarded(result: Result) -> Result:
    if result.outcome is Outcome.OK:
        return result
    return NotOk(**{each.name: getattr(result, each.name) for each in fields(result)})


def measured(
    config: pytest.Config,
    results: list[Result],
    /,
    what: str | Callable[..., object],
    *arguments: Any,
    ram: str | None = None,
    isolation: str | None = None,
    timeout_s: float = 600.0,
    **options: Any,
) -> Result:
    """Do what ``Weighin.measure`` documents, and add the result to ``results``."""
    chosen = isolation or isolation_of(config)
    with tempfile.TemporaryDirectory(prefix="weighin-test-") as folder:
        if callable(what):
            limit = Limit("1", ram=ram, timeout_s=timeout_s)
            result = _call(Path(folder), (what, arguments, options), limit, chosen)
        elif arguments:
            raise TypeError("a strategy takes no arguments: give options by name")
        else:
            suite = {"isolation": chosen, "timeout_s": timeout_s, "ram": [ram or "none"]}
            result = _load(Path(folder), what, suite, options)
    results.append(result)
    return guarded(result)


def _load(folder: Path, strategy: str, suite: dict[str, Any], options: dict[str, Any]) -> Result:
    suite |= {
        "models": [options.pop("model", "gpt2-small")],
        "strategies": [{"name": strategy, "options": options.pop("options", None) or {}}],
        "uses": options.pop("use", FORWARD),
        "dtype": "float32",
    }
    if unknown := options.keys() - _OF_LOADS:
        raise TypeError(f"measure() of a strategy has no option {min(unknown)!r}")
    suite |= {name: value for name, value in options.items() if value}
    task, _ = plans.start(check_suite(suite), folder / "run")
    try:
        (result,) = runner.run(replace(task, patience_s=PATIENCE_S), Progress())
    except Interrupted:
        raise KeyboardInterrupt from None
    if result.outcome == "measurement_failed":
        raise HarnessError(f"{strategy} could not be measured: {result.message}")
    return result


def _call(folder: Path, call: Call, limit: Limit, isolation: str) -> Result:
    """Call a function in a new process; raise ConfigError if it or an argument cannot be pickled."""
    function = getattr(call[0], "__qualname__", str(call[0]))
    path = folder / "call.pickle"
    try:
        path.write_bytes(pickle.dumps(call))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{function} cannot be called in another process: {error}",
            "measure a function that is defined at the top of a module, and give it arguments"
            " that can be pickled, because weighin sends both to another process",
        ) from None
    return _run(folder, Body(str(path)), function, limit, isolation)


def isolation_of(config: pytest.Config) -> str:
    return str(config.getoption("weighin_isolation") or config.getini("weighin_isolation"))


def run_item(item: pytest.Item, limit: Limit) -> list[pytest.TestReport]:
    """Run a test in a new process, and return the test's reports. The test fails if its memory
    grows by more than ``limit.size``.
    """
    try:
        allowed = parse_bytes(limit.size)
        if limit.metric not in METRICS:
            raise UnknownName("metric", limit.metric, METRICS)
        with tempfile.TemporaryDirectory(prefix="weighin-test-") as folder:
            path = Path(folder) / "reports.json"
            body = Body(str(path), _arguments(item))
            result = _run(Path(folder), body, item.name, limit, isolation_of(item.config))
            reports = _read_reports(item.config, path)
    except HarnessError as error:
        return [_failed(item, str(error))]
    if not reports:
        ended = f"{result.outcome}: {result.message}"
        why = f"the process of the test ended before pytest could report: {ended}"
        return [_failed(item, why, result)]
    judged = [_judged(item, report, result, limit, allowed) for report in reports]
    if result.outcome is Outcome.STRATEGY_FAILED and not any(each.failed for each in judged):
        judged.append(_failed(item, f"the test broke off: {result.message}", result))
    return judged


def _run(folder: Path, body: Body, name: str, limit: Limit, isolation: str) -> Result:
    if isolation == "docker":
        raise IsolationUnavailable(
            "a test's body cannot run in Docker: a container cannot write the test's report",
            "use --weighin-isolation cgroup or process, or measure a strategy: weighin.measure(...)",
        )
    chosen, _ = select.choose(isolation, limited=limit.ram is not None, containers=False)
    cell = Cell(ModelSpec("none", "none:none"), name, chosen.name, device=limit.device)
    cell = replace(cell, ram_limit_bytes=parse_bytes(limit.ram) if limit.ram else None)
    path = tuple(folder or str(Path.cwd()) for folder in sys.path)
    job = Job(cell, checkpoint="", manifest="", strategy_path="", python_path=path, body=body)
    (folder / "samples").mkdir()
    settings = Settings().model_copy(update={"timeout_s": limit.timeout_s})
    measured = measure(chosen, LoadSpec(job, settings=settings), environment.machine())
    measured.finish(folder)
    return measured.result


def _arguments(item: pytest.Item) -> tuple[str, ...]:
    """Return the arguments of the pytest that runs a test in the measured process."""
    config = item.config
    ini = ("-c", str(config.inipath)) if config.inipath else ()
    # Options of the ini file could start coverage or xdist in the measured process, or overwrite the
    # report files of the user's pytest.
    root = ("--rootdir", str(config.rootpath), "-o", "addopts=", "-p", "no:cacheprovider")
    path, _, rest = item.nodeid.partition("::")
    node = f"{config.rootpath / path}::{rest}"
    return (node, *ini, *root, "-q", *config.getini("weighin_body_args"))


def _read_reports(config: pytest.Config, path: Path) -> list[pytest.TestReport]:
    if not path.exists():
        return []
    hook = config.hook.pytest_report_from_serializable
    serialized = json.loads(path.read_text(encoding="utf-8"))
    reports: list[pytest.TestReport] = [hook(config=config, data=data) for data in serialized]
    for report in reports:
        if isinstance(report.longrepr, list):  # JSON made a list of a skip's tuple
            report.longrepr = tuple(report.longrepr)
    return reports


def _judged(
    item: pytest.Item, report: pytest.TestReport, result: Result, limit: Limit, allowed: int
) -> pytest.TestReport:
    """Return the report. Return a failure instead if the memory was not measured or grew by more
    than ``allowed``, or if the kernel killed a child process.
    """
    if report.when != "call" or not report.passed:
        if report.failed:
            report.sections += _sections(result)
        return report
    if result.outcome is Outcome.CHILD_KILLED:
        return _failed(item, f"{result.outcome}: {result.message}", result)
    metric, (of_peak, of_start) = limit.metric, METRICS[limit.metric]
    peak, start = getattr(result.peaks, of_peak), getattr(result.baseline, of_start, 0)
    if peak is None or start is None:
        needs = {"cgroup": ": needs the isolation cgroup", "cuda": ': needs device="cuda"'}
        why = f"{metric} was not measured under the isolation {result.cell.isolation}"
        return _failed(item, f"{why}{needs.get(metric, '')}", result)
    # rss and anon leave out the memory of a test's child processes, which weighin samples.
    others = result.peaks.others_private_sampled_bytes if metric in ("rss", "anon") else 0
    growth, held = peak - start, others or 0
    if growth + held <= allowed:
        return report
    kind = "sampled" if metric == "anon" else "exact"
    text = f"{metric} ({kind}) grew by {format_bytes(growth)} during the test's body"
    than = f"limit of {format_bytes(allowed)}"
    if growth > allowed:
        text += f", more than its {than}"
    else:
        children = f"its child processes had {format_bytes(held)} of private memory (sampled)"
        text += f", and {children}: together more than the {than}"
    before = result.baseline.rss_bytes if result.baseline else 0
    if highest := max(result.phases, key=lambda phase: phase.peak_rss_bytes, default=None):
        above = f"{format_bytes(highest.peak_rss_bytes - before)} above the start"
        text += f"\nthe phase with the highest peak RSS is {highest.name!r}: {above}"
    return _failed(item, text, result)


def phase_table(result: Result) -> str:
    """Return a table of the phases; an error message and the RSS at the start follow, if any."""
    rows: list[tuple[str, ...]] = [_HEADS]
    for phase in result.phases:
        peaks = phase.peak_cgroup_bytes, phase.peak_cuda_allocated_bytes
        sizes = phase.peak_rss_bytes, phase.end.anon_bytes, *peaks
        texts = ("-" if size is None else format_bytes(size) for size in sizes)
        rows.append((phase.name, format_seconds(phase.end_ns - phase.start_ns), *texts))
    columns = [each for each in zip(*rows, strict=True) if {*each[1:]} - {"-"}]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in zip(*columns, strict=True)
    ]
    if result.message:
        lines.append(f"{result.outcome}: {result.message}")
    if result.baseline:
        lines.append(f"RSS at the start: {format_bytes(result.baseline.rss_bytes)}")
    return "\n".join(lines)


def _sections(result: Result | None) -> list[tuple[str, str]]:
    if result is None:
        return []
    phases = tuple(phase for phase in result.phases if phase.name != "import")
    title = f"weighin: phases under {result.cell.isolation}"
    return [(title, phase_table(replace(result, phases=phases)))]


def _failed(item: pytest.Item, message: str, result: Result | None = None) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=message,
        when="call",
        sections=_sections(result),
        duration=(result.cost.wall_ns / 1e9 if result and result.cost else 0.0),
    )
