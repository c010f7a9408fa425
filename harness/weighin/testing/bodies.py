"""Measure a load for a test, or a test or any function in a new process, with its phases and limits."""

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
from weighin.errors import ConfigError, HarnessError, Interrupted, IsolationUnavailable, UnknownName
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

METRICS: Final = {
    "rss": ("rss_bytes", "rss_bytes", ""),
    "anon": ("anon_sampled_bytes", "anon_bytes", ""),
    "cgroup": ("cgroup_bytes", "cgroup_bytes", ": needs the isolation cgroup"),
    "cuda": ("cuda_allocated_bytes", "cuda_allocated_bytes", ': needs device="cuda"'),
}
"""The fields of a metric in ``Peaks`` and in ``Memory``, and what it needs."""
_PATIENCE_S: Final = 600.0  # for other runs to end: xdist runs tests in parallel
_OF_LOADS: Final = frozenset({
    "device", "dtype", "cache", "format", "checkpoint", "kwargs", "trust_remote_code", "variant",
    "model_class", "revision",
})  # fmt: skip
_ROW: Final = "{:20}  {:>8}  {:>12}  {:>16}  {:>12}  {:>12}"


@dataclass(frozen=True, slots=True)
class Limit:
    """The arguments of the marker ``limit_peak``; a test's memory may grow by at most ``size``."""

    size: str
    metric: str = "rss"
    ram: str | None = None
    timeout_s: float = 600.0
    device: str = "cpu"


class NotOk(Result):
    """The result of what did not end ok: reading its peaks, which are incomplete, raises AssertionError."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name in ("peaks", "above_import_bytes", "use_phases"):
            __tracebackhide__ = True
            what = f"{self.cell.strategy} did not end ok: {self.outcome}: {self.message}"
            raise AssertionError(f"{name} cannot be read, because {what.removesuffix(': ')}")
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return f"<result of {self.cell.strategy}: {self.outcome}>"


def guarded(result: Result) -> Result:
    if result.outcome is Outcome.OK:
        return result
    return NotOk(**{each.name: getattr(result, each.name) for each in fields(result)})


def measured(
    what: str | Callable[..., object],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    limit: Limit,
    isolation: str,
) -> Result:
    """Do what ``Weighin.measure`` documents."""
    with tempfile.TemporaryDirectory(prefix="weighin-test-") as folder:
        if not callable(what):
            if arguments:
                raise TypeError("a strategy takes no arguments: give options by name")
            return _load(Path(folder), what, options, limit, isolation)
        name, path = getattr(what, "__qualname__", str(what)), Path(folder, "call.pickle")
        try:
            path.write_bytes(pickle.dumps((what, arguments, options)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{name} cannot be called in another process: {error}",
                "measure a function at the top of a module, with arguments that can be pickled",
            ) from None
        return _run(Body(str(path)), name, limit, isolation)


def _load(
    folder: Path, strategy: str, options: dict[str, Any], limit: Limit, isolation: str
) -> Result:
    suite = {
        "isolation": isolation,
        "timeout_s": limit.timeout_s,
        "ram": [limit.ram or "none"],
        "models": [options.pop("model", "gpt2-small")],
        "strategies": [{"name": strategy, "options": options.pop("options", None) or {}}],
        "uses": options.pop("use", FORWARD),
        "dtype": "float32",
    }
    if unknown := options.keys() - _OF_LOADS:
        known = ", ".join(sorted(_OF_LOADS))
        raise TypeError(f"measure() of a strategy has no option {min(unknown)!r}, only {known}")
    suite |= {name: value for name, value in options.items() if value}
    task, _ = plans.start(check_suite(suite), folder / "run")
    try:
        (result,) = runner.run(replace(task, patience_s=_PATIENCE_S), Progress())
    except Interrupted:
        raise KeyboardInterrupt from None
    if result.outcome is Outcome.MEASUREMENT_FAILED:
        raise HarnessError(f"{strategy} could not be measured: {result.message}")
    return result


def isolation_of(config: pytest.Config) -> str:
    return str(config.getoption("weighin_isolation") or config.getini("weighin_isolation"))


def run_item(item: pytest.Item, limit: Limit) -> list[pytest.TestReport]:
    """Run a test in a new process, and return its reports; it fails if its memory grows beyond its limit."""
    try:
        allowed = parse_bytes(limit.size)
        if limit.metric not in METRICS:
            raise UnknownName("metric", limit.metric, METRICS)
        with tempfile.TemporaryDirectory(prefix="weighin-test-") as folder:
            path = Path(folder, "reports.json")
            body = Body(str(path), _arguments(item))
            result = _run(body, item.name, limit, isolation_of(item.config))
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except HarnessError as error:
        return [_failed(item, str(error))]
    ended = f"{result.outcome}: {result.message}"
    if not found:
        why = f"the process of the test ended before pytest could report: {ended}"
        return [_failed(item, why, result)]
    reports: list[pytest.TestReport] = []
    for data in found:
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        if isinstance(report.longrepr, list):  # JSON made a list of a skip's tuple
            report.longrepr = tuple(report.longrepr)
        if report.failed:
            report.sections.append(section(result))
        elif report.when == "call" and report.passed:
            is_killed = result.outcome is Outcome.CHILD_KILLED
            if why := ended if is_killed else excess(result, limit, allowed):
                report = _failed(item, why, result)
        reports.append(report)
    if result.outcome is Outcome.STRATEGY_FAILED and not any(each.failed for each in reports):
        reports.append(_failed(item, f"the test broke off: {result.message}", result))
    return reports


def _run(body: Body, name: str, limit: Limit, isolation: str) -> Result:
    if isolation == "docker":
        raise IsolationUnavailable(
            "a test's body cannot run in Docker: a container cannot write the test's report",
            "use --weighin-isolation cgroup or process, or measure a strategy: weighin.measure(...)",
        )
    chosen, _ = select.choose(isolation, limited=limit.ram is not None, containers=False)
    ram_bytes = parse_bytes(limit.ram) if limit.ram else None
    cell = Cell(ModelSpec("none", "none:none"), name, chosen.name, ram_bytes, limit.device)
    path = tuple(folder or str(Path.cwd()) for folder in sys.path)
    job = Job(cell, checkpoint="", manifest="", strategy_path="", python_path=path, body=body)
    settings = Settings().model_copy(update={"timeout_s": limit.timeout_s})
    measured = measure(chosen, LoadSpec(job, settings=settings), environment.machine())
    if measured.trouble:
        raise measured.trouble
    return measured.result


def _arguments(item: pytest.Item) -> tuple[str, ...]:
    config = item.config
    ini = ("-c", str(config.inipath)) if config.inipath else ()
    # Options of the ini file could start coverage or xdist in the measured process, or overwrite the
    # report files of the user's pytest.
    root = ("--rootdir", str(config.rootpath), "-o", "addopts=", "-p", "no:cacheprovider")
    path, _, rest = item.nodeid.partition("::")
    node = f"{config.rootpath / path}::{rest}"
    return (node, *ini, *root, "-q", *config.getini("weighin_body_args"))


def excess(result: Result, limit: Limit, allowed: int) -> str:
    """Return why a test fails: its memory was not measured, or grew by more than ``allowed``; else ""."""
    of_peak, of_start, needs = METRICS[limit.metric]
    peak, start = getattr(result.peaks, of_peak), getattr(result.baseline, of_start, 0)
    if peak is None or start is None:
        return f"{limit.metric} was not measured under the isolation {result.cell.isolation}{needs}"
    is_one, others = limit.metric in ("rss", "anon"), ""  # they leave out child processes
    held = (is_one and result.peaks.others_private_sampled_bytes) or 0
    if (growth := peak - start) + held <= allowed:
        return ""
    if held:
        others = f", and its child processes had {format_bytes(held)} of private memory (sampled)"
    kind = "sampled" if limit.metric == "anon" else "exact"
    text = f"{limit.metric} ({kind}) grew by {format_bytes(growth)} during the test's body{others}"
    return f"{text}, more than its limit of {format_bytes(allowed)}"


def section(result: Result) -> tuple[str, str]:
    """Return a table of a result's phases, as a section of a test's report."""
    heads = ("phase", "time", "peak RSS", "anonymous at end", "cgroup peak", "CUDA peak")
    lines = [_ROW.format(*heads)]
    for phase in result.phases:
        peaks = phase.peak_cgroup_bytes, phase.peak_cuda_allocated_bytes
        sizes = phase.peak_rss_bytes, phase.end.anon_bytes, *peaks
        texts = ("-" if size is None else format_bytes(size) for size in sizes)
        lines.append(_ROW.format(phase.name, format_seconds(phase.end_ns - phase.start_ns), *texts))
    if result.message:
        lines.append(f"{result.outcome}: {result.message}")
    if result.baseline:
        lines.append(f"RSS at the start: {format_bytes(result.baseline.rss_bytes)}")
    cell = result.cell
    return f"weighin: {cell.strategy} {result.outcome} under {cell.isolation}", "\n".join(lines)


def _failed(item: pytest.Item, message: str, result: Result | None = None) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=message,
        when="call",
        sections=[section(result)] if result else (),
        duration=result.cost.wall_ns / 1e9 if result and result.cost else 0.0,
    )
