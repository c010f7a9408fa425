"""``weighin run``: run any command under limits, and print the memory that the command needed."""

import os
import signal
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _arguments, _console, _measuring, _options
from weighin.cli._verb import Verb
from weighin.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weighin.plan.task import Node, Run
    from weighin.result import Result
    from weighin.settings.definition import Settings

EXAMPLES = {
    "Measure a command without a limit": "weighin run -- python train.py --epochs 1",
    "Measure a command under a RAM limit of 4 GiB": "weighin run --ram 4g -- python train.py",
    "Measure a command three times under each of two limits, with w.pt out of the page cache": "weighin run --ram 8g,4g --repeats 3 --cold w.pt -- python load.py w.pt",
    "Mark the time of each output line that contains 'epoch'": "weighin run --ram 1g --mark epoch -- sh -c 'cat data | python train.py'",
    "Run the command in a container of this image": "weighin run --ram 16g --image vllm/vllm-openai -- vllm serve ./model",
    "Measure each command of a suite": "weighin run --suite commands --out results/commands",
    "Go on with a stopped run": "weighin run --resume results/20261126T090000-train.py-4GiB",
}


@click.command(
    cls=Verb,
    examples=EXAMPLES,
    codes=True,
    context_settings={"show_default": True, "allow_interspersed_args": False},
)
@_options.command
@click.option(
    "--ram",
    default="none",
    metavar="SIZES",
    help="RAM limits, comma-separated: 8g, 600m, none (no limit). weighin runs the command under"
    " each limit in turn.",
)
@click.option(
    "--repeats", default=1, metavar="N", help="How many times to run the command under each limit."
)
@_options.isolation
@_options.image
@_options.mounts
@_options.cold
@click.option(
    "--mark",
    "marks",
    multiple=True,
    metavar="REGEX",
    help="On the report's timeline, mark each line of output that matches this regular expression."
    " Repeatable.",
)
@_options.server
@click.option(
    "--stacks/--no-stacks",
    default=True,
    help="Read the stacks of Python processes near the memory peak, to name the line of code that"
    " allocated the memory. Each reading stops the command for an instant; --no-stacks avoids this"
    " loss of time. With --repeats of 2 or more, weighin reads no stacks.",
)
@_options.environment
@click.option(
    "--timeout",
    "timeout_s",
    type=_options.SECONDS,
    default=0.0,
    metavar="SECONDS",
    help="Seconds after which weighin kills the command; 0 for no time-out.",
)
@_options.label
@_options.suite
@_options.engine
@_options.shard
@_options.out("DATE-LABEL-RAM")
@_options.resume
@_options.trust
@_options.json
@click.pass_context
def run(context: click.Context, /, **_: Any) -> None:
    """Run a command under limits; show its peak memory, the peak's cause, and why it was killed.

    The command keeps its standard streams, terminal, folder and environment. With one
    limit and no repeats, weighin exits with the command's own exit code.
    """
    from weighin.plan.task import Progress
    from weighin.run.runner import resumable

    typed = _arguments.read(context)
    if typed["engine"] == "local":
        _measuring.enter_scope("cgroup" if typed["isolation"] == "auto" else typed["isolation"])
    with (
        _measuring.planned(typed, partial(_start, typed)) as (task, perform),
        resumable("run", task),
    ):
        results = list(perform(task, Progress()))
    _end(context, task, results, typed["json_file"])


def _start(
    typed: dict[str, Any], engine: dict[str, Any], nodes: "Sequence[Node]"
) -> "tuple[Run, str]":
    """Plan a run of the typed command, or of the commands in a suite; return the run and a note."""
    from weighin.plan.start import start

    if engine:
        _console.note(
            "on a node of the cluster, the command's standard input is empty, and its output is not"
            " shown",
        )
    return start(command_settings(typed, engine=engine), typed["folder"], nodes)


def command_settings(typed: dict[str, Any], **more: Any) -> "Settings":
    """Return the settings of the typed command, or of the suite that --suite names, with ``more``."""
    from pathlib import Path

    from weighin.plan.start import label_of
    from weighin.records.run_folder import parse_shard
    from weighin.settings.definition import COMMANDS, SuiteCommand, check_suite, read_suite

    if typed.get("suite"):
        from weighin.suite.registry import suite_file

        settings = read_suite(suite_file(typed["suite"]), COMMANDS)
    elif not typed["command"]:
        raise ConfigError(
            "no command was given",
            "write the command after --: weighin run --ram 4g -- python x.py",
        )
    else:
        # Not validated, because a command line may set any variable, and a program may have any name.
        command = SuiteCommand.model_construct(
            name=typed["label"] or label_of(typed["command"]),
            command=list(typed["command"]),
            cold=list(typed["cold"]),
            marks=list(typed.get("marks", ())),
            environment=_arguments.environment(typed["env"]),
        )
        content = {
            "commands": [command],
            "ram": _arguments.names([typed.get("ram") or "none"]),
            "repeats": typed.get("repeats", 1),
            "isolation": typed["isolation"],
            "timeout_s": typed["timeout_s"],
            "image": typed["image"],
            # The reading of stacks takes time, which repeats would measure.
            "stacks": typed.get("stacks", False) and typed.get("repeats", 1) == 1,
        }
        settings = check_suite(content)
    located = [
        each.model_copy(update={"cold": [str(Path(path).absolute()) for path in each.cold]})
        for each in settings.commands
    ]
    beside = {
        "commands": located,
        "cwd": _current_folder(),
        "ready": typed["ready"],
        "ready_url": typed["ready_url"],
        "grace_s": typed["grace_s"],
        "mounts": tuple(str(path.absolute()) for path in typed["mounts"]),
        "shard": parse_shard(typed["shard"]) if typed.get("shard") else None,
    }
    return settings.model_copy(update=beside | more)


def _current_folder() -> str:
    """Return the path of the current folder; empty if it was deleted, where a command can still run."""
    try:
        return os.getcwd()  # noqa: PTH109 (pathlib takes time to import)
    except FileNotFoundError:
        return ""


def _end(
    context: click.Context, task: "Run", results: "list[Result]", json_file: str | None
) -> None:
    """Show the results. Exit with the command's code, or the run's after several measurements."""
    from weighin.records import explanation

    if len(results) > 1:
        from weighin.cli.report import show_run
        from weighin.records import run_folder

        show_run(task.folder, run_folder.of_results(task.folder, results), json_file=json_file)
        _measuring.end(context, results)
        return
    (result,) = results
    notes = result.ran.notes if result.ran else ()
    lines = [*explanation.answer(task.folder, result), *(f"note: {each}" for each in notes)]
    for line in [*lines, f"weighin report {quote(str(task.folder))}"]:
        _console.tell(f"weighin: {line}")
    if json_file:
        from weighin.report.run_json import of_run

        _console.write_json(json_file, of_run(task.folder, results, ()))
    # A late shell whose child was killed just before it may end with 0.
    failed = 128 + signal.SIGKILL if result.outcome == "timeout" else 1
    context.exit(0 if result.outcome == "ok" else result.exit_code or failed)
