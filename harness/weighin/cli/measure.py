"""``weighin bench``, ``run``, ``floor`` and ``bisect``: measure loads, saves and commands."""

import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _console, _options
from weighin.cli._verb import LIMITS, WHAT, WRITE, parameters, verb
from weighin.errors import ConfigError

if TYPE_CHECKING:
    from weighin.fleet.driver import Perform
    from weighin.plan.task import Progress, Run
    from weighin.result import Result
    from weighin.settings.definition import Settings


@verb(
    _options.MODEL,
    *_options.settings("bench", timeout_s="600"),
    _options.SUITE,
    *_options.run("DATE-MODEL-RAM"),
    codes=True,
    examples={
        "Load gpt2-xl in six ways, three times each, under 8 GiB of RAM": "weighin bench gpt2-xl --ram 8g --repeats 3",
        "Load your own model and checkpoint in two ways": "weighin bench --model nets.py:build --checkpoint w.pt -s baseline,streaming",
        "Measure a suite with other limits, and a key that has no option": "weighin bench --suite ci --ram 2g,none --set seed=3",
    },
)
def bench(context: click.Context, _: dict[str, Any]) -> None:
    """Load a model with each strategy, every load in a new process, and measure memory and time."""
    from weighin.cli._progress import progress
    from weighin.run.runner import resumable

    with _planned(context) as (task, perform):
        limits = [planned.cell.ram_limit_bytes for planned in task.planned]
        if not task.isolation.limits or not any(limits):
            _console.note(
                "this run has no RAM limit: weighin measures peaks, but only a run with --ram shows"
                " whether a strategy fits"
            )
        with progress(_console.console(), len(task.planned)) as shown, resumable("bench", task):
            results = perform(task, shown)
    _report(context, task, results)


@verb(
    _options.COMMAND,
    *_options.settings("run", timeout_s="0", stacks="stacks"),
    _options.SUITE,
    *_options.run("DATE-NAME-RAM"),
    codes=True,
    context_settings={"allow_interspersed_args": False},
    examples={
        "Measure a command under a RAM limit of 4 GiB": "weighin run --ram 4g -- python train.py",
        "Run it three times under each of two limits, with w.pt out of the page cache": "weighin run --ram 8g,4g --repeats 3 --cold w.pt -- python load.py w.pt",
        "Run a server in a container of the image vllm/vllm-openai": "weighin run --ram 16g --image vllm/vllm-openai -- vllm serve ./model",
        "Measure each command of a suite": "weighin run --suite commands --out results/commands",
    },
)
def run(context: click.Context, typed: dict[str, Any]) -> None:
    """Run a command under limits; show its peak memory, the peak's cause, and why it was killed.

    The command keeps its standard streams, terminal, folder and environment. Measured once,
    it gives weighin its exit code. If that is 0, but the kernel killed a process for lack of memory,
    or the measurement failed, weighin exits with 1.
    """
    from weighin.run.runner import resumable

    if typed["json"] == _console.STDOUT:
        why = "--json - would mix the JSON with the output of the command"
        raise ConfigError(why, "write the JSON to a file: --json result.json")
    with (
        _planned(context) as (task, perform),
        until_a_command() as shown,
        resumable("run", task),
    ):
        results = list(perform(task, shown))
    if len(results) > 1:
        _report(context, task, results)
    else:
        _end_of_command(context, task, results[0])


@verb(
    _options.MODEL,
    _options.COMMAND,
    *parameters(
        {
            "--within SHARE": "How exact the floor must be, as a share of it. It is never more exact than 8 MiB (of a command: 1 MiB).",
            "--thrashing": "Accept a load or command that reads the same pages again and again, as long as it ends before --timeout.",
        },
        LIMITS,
        within="1%",
    ),
    *_options.settings("floor", uses="none", timeout_s="300; of a command, 30 + 10 x its time"),
    *_options.run("DATE-MODEL-floor"),
    codes=True,
    examples={
        "Find the smallest RAM limit under which each of six ways loads the model": "weighin floor gpt2-medium",
        "Find it for a load and a step of training after it, with a precision of 2 %": "weighin floor gpt2-small --use adamw -s baseline,mmap_assign --within 2%",
        "Find it for a command": "weighin floor --cold weights.pt -- python load.py weights.pt",
        "Find it for a server, which is ready when it answers": "weighin floor --ready-url http://127.0.0.1:8000/health -- vllm serve ./model",
    },
)
def floor(context: click.Context, typed: dict[str, Any]) -> None:
    """Find the smallest RAM limit under which each strategy loads a model, and measure that load.

    With --use, the limit must also suffice for the use of the model after the load.

    A load thrashes if it reads evicted pages again and again. That would take very long, so weighin
    stops it, for example once it has reread more than 3 times the model's size, or if it waits for
    memory and takes more than 10 times as long as without a limit.

    With a command after --, find the smallest limit under which the command ends with exit code 0, or
    (--ready) is ready. The command runs about ten times, with an empty standard input; only the run
    without a limit shows the command's output. Without --timeout, a try fails after 30 s plus 10
    times what the command took without a limit.
    """
    from weighin.cli._progress import progress
    from weighin.records import run_folder
    from weighin.records.series import Measured
    from weighin.run import runner
    from weighin.show import findings
    from weighin.show.write import write

    with (
        _planned(context) as (task, _perform),
        progress(_console.console(), None) as shown,
        runner.resumable("floor", task),
    ):
        results = runner.search(task, shown)
    measured = Measured.of(task.folder, run_folder.read(task.folder))
    if typed["json"] != _console.STDOUT:
        _console.show(*findings.floors(measured))
    files = write(measured)
    _console.files(files, typed["json"])
    if typed["json"]:
        floors = [findings.floor_as_dict(one) for one in measured.floors]
        found = {"run": str(task.folder), "floors": floors, "files": [str(path) for path in files]}
        _console.deliver(typed["json"], found)
    _end(context, results)


@verb(
    _options.MODEL,
    _options.COMMAND,
    *parameters(
        {
            "--package NAME": "The package to bisect.",
            "--from RELEASE": "The first release of the range, such as 4.48. weighin searches among the releases up to --to that pip finds in the package index.",
            "--to RELEASE": "The last release of the range. Default: the newest.",
            "--metric METRIC": "The figure that grew: anon, peak_rss, ready ... as in a budget of `weighin check`. Default: anon; of a command, needed.",
            "--tolerance SHARE": "By how much the figure must exceed that of the first release to count as growth.",
        },
        WHAT,
        metric="",
        tolerance="10%",
    ),
    *(one for one in _options.settings("bisect") if one.name != "with"),
    *parameters({"--out FOLDER": "A new folder, with a run for each measured release. Default: results/DATE-bisect-PACKAGE."}, WRITE),
    _options.JSON,
    codes=True,
    examples={
        "Which release of transformers takes more memory to load this folder": "weighin bisect ./model --strategy transformers --package transformers --from 4.48 --to 5.9",
        "Which release of safetensors made a script slower": "weighin bisect --package safetensors --from 0.4.5 --metric time -- python load.py",
    },
)  # fmt: skip
def bisect(context: click.Context, typed: dict[str, Any]) -> None:
    """Find the first release of a package with which a load, or a command, takes more.

    weighin measures the first and the last release, then always the one in the middle of those that remain,
    each in an environment of its own (--with). It skips a release that cannot be installed or measured. If
    the figure grows more than once, weighin finds one of the releases at which it passes the tolerance.
    """
    from weighin.cli._progress import progress
    from weighin.fleet import driver
    from weighin.plan import start
    from weighin.records import metrics, run_folder
    from weighin.records.series import summarise
    from weighin.run import releases
    from weighin.show.table import Table

    package, is_of_command = typed["package"], typed["command"] is not None
    metric = metrics.named(typed["metric"] or ("needed" if is_of_command else "anon"))
    if not package or not typed["from"]:
        why = "weighin bisect needs --package and --from"
        raise ConfigError(why, "for example: --package transformers --from 4.48")
    settings = new_settings(context)
    if not settings.commands and len(settings.strategies) > 1:
        raise ConfigError("bisect measures one strategy", "name one: --strategy transformers")
    more = 1 + share(typed["tolerance"], "--tolerance")
    with _console.working(f"asking the index for the releases of {package}"):
        known = releases.between(package, typed["from"], typed["to"])
    out = typed["out"] or start.new_folder([f"bisect-{package}"])

    def figure(release: str) -> int | None:
        """Measure a release in a run of its own, in ``out``; None if it cannot be measured."""
        chosen = settings.model_copy(update={"releases": [f"{package}=={release}"]})
        with driver.opened({}) as (_, perform):
            task, _ = start.start(chosen, out / release)
            bar = progress(_console.console(), len(task.planned)) if not is_of_command else None
            with bar or until_a_command() as shown:
                perform(task, shown)
        found, *others = summarise([run_folder.read(task.folder)]).values()
        if others:
            raise ConfigError("bisect measures one load", "give one --format, --use and --ranks")
        if metric.name not in found.figures:
            _console.note(f"left out {package} {release}: {found.outcome}: {found.message}")
            return None
        return found.figures[metric.name].median

    measured = search(known, figure, more)
    tried = sorted(measured, key=known.index)
    if len(tried) < 2:
        repair = "see the notes on why releases were left out, or choose another --from or --to"
        raise ConfigError(f"fewer than two releases of {package} could be measured", repair)
    above = [one for one in tried if measured[one] > more * measured[tried[0]]]
    last = above[0] if above else tried[-1]
    before = tried[tried.index(last) - 1]
    figures = {one: metric.text(measured[one]) for one in tried}
    answer = (
        f"{package} {last} is the first with more {metric.title}: {figures[last]};"
        f" {before} takes {figures[before]}."
        if above
        else f"No release of {package} up to {last} takes more {metric.title} than {tried[0]}:"
        f" {figures[last]}."
    )
    document = {"package": package, "metric": metric.name, "measured": measured}
    document |= {"before": before, "first": last if above else None, "folder": str(out)}
    table = Table.of((package, metric.title), figures.items())
    _console.deliver(typed["json"], document, table, answer)


def search(
    known: Sequence[str], figure: Callable[[str], int | None], more: float
) -> dict[str, int]:
    """Return the figures of the releases that were tried to find the first above ``more`` times the first's.

    ``figure`` is None for a release that cannot be measured: it is left out.
    """
    left, found = list(known), dict[str, int]()

    def take(at: int) -> bool:
        if (value := figure(left[at])) is None:
            del left[at]
            return False
        found[left[at]] = value
        return True

    while left and not take(0):
        pass
    while len(left) > 1 and not take(-1):
        pass
    if len(left) < 2 or found[left[-1]] <= more * found[left[0]]:
        return found
    low, high = 0, len(left) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if not take(middle):
            high -= 1
        elif found[left[middle]] > more * found[left[0]]:
            high = middle
        else:
            low = middle
    return found


@contextmanager
def until_a_command() -> "Iterator[Progress]":
    """Show the progress of what comes before a command, such as an installation: then the terminal is the command's."""
    from weighin.plan.task import Progress

    with ExitStack() as shown:

        def prepare(step: str, share_done: float | None) -> None:
            from weighin.cli._progress import progress  # imports rich, which takes time

            shown.close()
            shown.enter_context(progress(_console.console(), None)).preparing(step, share_done)

        yield Progress(preparing=prepare, starting=lambda _: shown.close())


@contextmanager
def _planned(context: click.Context) -> "Iterator[tuple[Run, Perform]]":
    """Yield the new run that the user typed, or that of --resume, and what performs it."""
    from weighin.fleet import driver
    from weighin.isolation import cgroup
    from weighin.plan import start

    typed, verb, assigned = context.params, context.command.name, _options.assigned(context)
    if typed["resume"]:
        _options.check(context)
        cgroup.enter_scope(sys.argv[1:])
        task = start.resume(typed["resume"], trusted=typed["trust"], search=verb == "floor")
        place: Mapping[str, Any] = task.settings.engine
        if address := assigned.get("address"):
            name, labels = place.get("name", "local"), place.get("labels", {})
            place = driver.engine_settings(name, address, labels)
        is_patient = str(assigned.get("wait", "")).lower() in ("true", "yes", "1")
        with driver.opened(place) as (_, perform):
            yield replace(task, patience_s=math.inf if is_patient else 0), perform
        return
    settings = new_settings(context)
    name, place = settings.engine.get("name", "local"), dict[str, Any]()
    if verb != "floor":
        place = driver.engine_settings(name, settings.address, settings.labels, settings.jobs)
    if name == "local" and settings.isolation in ("auto", "cgroup"):
        cgroup.enter_scope(sys.argv[1:])
    with driver.opened(place) as (nodes, perform):
        settings = settings.model_copy(update={"engine": place})
        task, note = start.start(settings, typed["out"], nodes)
        _console.note(note)
        yield replace(task, patience_s=math.inf if settings.wait else 0), perform


def new_settings(context: click.Context) -> "Settings":
    """Return the settings of a new run; those of commands with the current folder and whole paths."""
    verb, typed = context.command.name, context.params
    is_of_command = verb == "run" or typed.get("command") is not None
    usual: dict[str, Any] = {"stacks": True} if verb == "run" else {}
    if verb == "floor" and not is_of_command:
        usual = {"uses": ["none"], "timeout_s": 300.0}
    settings = _options.read(context, usual)
    update: dict[str, Any] = {}
    if verb == "floor":
        from weighin.records.floor import Aim

        aim = Aim.ENDS if typed["thrashing"] else Aim.SURVIVES
        update = {"within": share(typed["within"]), "aim": aim}
    if is_of_command:
        is_chosen = _options.is_typed(context, "stacks") or "stacks" in _options.assigned(context)
        if settings.repeats > 1 and not (typed["suite"] or is_chosen):
            update["stacks"] = False  # reading stacks takes time, which repeats would measure
        with suppress(FileNotFoundError):  # the folder was deleted, where a command can still run
            update["cwd"] = str(Path.cwd())
        update["commands"] = [
            each.model_copy(update={"cold": [str(Path(path).absolute()) for path in each.cold]})
            for each in settings.commands
        ]
        update["mounts"] = tuple(str(Path(path).absolute()) for path in settings.mounts)
    return settings.model_copy(update=update)


def share(text: str, option: str = "--within") -> float:
    """Return the number in an option's text: 0.01 for "1%" or "0.01"."""
    from weighin.records.floor import COARSEST

    within = 0.0
    with suppress(ValueError):
        within = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < within <= COARSEST:
        why = f"{option} {text}: not a share between 0% and {COARSEST:.0%}"
        raise ConfigError(why, f"write a percentage in this range, such as {option} 1%")
    return within


def _end_of_command(context: click.Context, task: "Run", result: "Result") -> None:
    from weighin.records import explanation

    notes = result.ran.notes if result.ran else ()
    lines = [*explanation.answer(task.folder, result), *(f"note: {each}" for each in notes)]
    for line in [*lines, f"weighin report {quote(str(task.folder))}"]:
        _console.tell(f"weighin: {line}")
    if target := context.params["json"]:
        from weighin.records import run_folder
        from weighin.records.series import Measured
        from weighin.show.report import as_json

        measured = Measured.of(task.folder, run_folder.read(task.folder))
        _console.deliver(target, as_json(measured, ()))
    # A late shell whose child was killed just before it may end with 0.
    failed = {"timeout": 128 + signal.SIGKILL, "skipped": 4}.get(result.outcome, 1)
    context.exit(0 if result.outcome == "ok" else result.exit_code or failed)


def _report(context: click.Context, task: "Run", results: "Sequence[Result]") -> None:
    from weighin.cli.results import show_run
    from weighin.records import run_folder

    show_run(task.folder, run_folder.read(task.folder), context.params["json"])
    _end(context, results)


def _end(context: click.Context, results: "Sequence[Result]") -> None:
    """Print each failed strategy, use or command; exit with the run's exit code if it is not 0."""
    for text in broken(results):
        _console.error(text)
    if code := exit_code_of(results):
        context.exit(code)


def exit_code_of(results: "Sequence[Result]") -> int:
    """Return 5 if an outcome is in ``BROKEN``, else 4 if a measurement or an installation failed, else 0."""
    from weighin.result import BROKEN, Outcome

    outcomes = {result.outcome for result in results}
    has_failed = Outcome.MEASUREMENT_FAILED in outcomes or any(
        one.cell.releases and one.outcome == Outcome.SKIPPED for one in results
    )
    return 5 if outcomes & {*BROKEN} else 4 * has_failed


def broken(results: "Sequence[Result]") -> list[str]:
    """Return a line for each result whose outcome is in ``BROKEN``; equal lines appear once."""
    from weighin.result import BROKEN
    from weighin.units import format_exact

    lines = dict[str, None]()
    for result in results:
        if result.outcome in BROKEN:
            limit = result.cell.ram_limit_bytes
            under_limit = f" under {format_exact(limit)}" if limit else ""
            message = f": {result.message}" if result.message else ""
            lines[f"{result.cell.strategy}{under_limit}: {result.outcome}{message}"] = None
    return [*lines]
