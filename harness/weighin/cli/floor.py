"""``weighin floor``: find the smallest RAM limit under which a load or a command works."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _arguments, _console, _measuring, _options
from weighin.cli._verb import VerbOfModelOrCommand

if TYPE_CHECKING:
    from weighin.plan.task import Run

EXAMPLES = {
    "Find the smallest RAM limit under which each of the six strategies loads the model": "weighin floor gpt2-medium",
    "Find the limit for two strategies, with a precision of 2 %": "weighin floor gpt2-xl --strategies mmap_assign,streaming --within 2%",
    "Use cgroups instead of containers, and print JSON": "weighin floor gpt2-small --isolation cgroup --json -",
    "Find the limit for one process, and for two and four that load in parallel": "weighin floor gpt2-small --ranks 1,2,4 -s baseline,mmap_assign",
    "Find the limit for the load and a use of the model, for each of two uses": "weighin floor gpt2-small --use write,adamw -s baseline,mmap_assign",
    "Find the limit for a command, with weights.pt out of the page cache at each start": "weighin floor --cold weights.pt -- python load.py weights.pt",
    "Find the limit for a server, which is ready when it answers at this address": "weighin floor --ready-url http://127.0.0.1:8000/health -- vllm serve ./model",
    "Go on with a search that was stopped": "weighin floor --resume results/20261120T093000-gpt2-medium-floor",
}
_OF_COMMANDS = {"cold", "ready", "ready_url", "grace_s", "label", "image"}
_OF_MODELS = {
    "model", "model_option", "kwargs", "variant", "revision", "model_class", "trust_remote_code",
    "adapter", "checkpoint", "key", "strip_prefix", "strategies", "device", "dtype", "fmt", "use",
    "ranks", "seed", "wait",
}  # fmt: skip


@click.command(cls=VerbOfModelOrCommand, examples=EXAMPLES, codes=True)
@_options.model
@_options.command
@_options.folder_choice
@_options.adapter
@_options.generated
@_options.selection
@_options.strategies
@click.option(
    "--within",
    default="1%",
    metavar="SHARE",
    help="Precision of the result: the search ends when the smallest limit that works is at most"
    " this percentage above the largest limit that fails, or when the two limits differ by at most"
    " 8 MiB (for a command: 1 MiB).",
)
@click.option(
    "--thrashing",
    is_flag=True,
    help="Find the smallest limit under which the load ends ok, even if the load thrashes (reads"
    " the same pages from the disk again and again). Such a search takes longer, because weighin"
    " lets a thrashing load run until --timeout.",
)
@_options.cold
@_options.server
@_options.label
@_options.image
@_options.isolation
@_options.device
@_options.dtype
@_options.formats
@_options.use("none")
@_options.ranks
@_options.environment
@_options.timeout(300.0)
@_options.seed
@_options.out("DATE-MODEL-floor")
@_options.resume
@_options.trust
@_options.wait
@_options.json
@_options.mounts
@click.pass_context
def floor(context: click.Context, /, **_: Any) -> None:
    """Find the smallest RAM limit under which each strategy loads a model, and measure that load.

    With --use, the limit must also suffice for the use of the model after the load.

    weighin stops a load that thrashes (reads evicted pages again and again): for example, a load
    that has read more than 3 times the model's size again, or that has lost time for lack of memory
    and takes more than 10 times as long as without a limit.

    With a command after --, find the smallest limit under which the command ends with exit code 0, or
    (--ready) is ready. The command runs about ten times, with an empty standard input; only the run
    without a limit shows the command's output. Without --timeout, a limit fails if the command takes
    longer than 10 times its time without a limit plus 30 s.
    """
    from weighin.cli import _progress
    from weighin.report import findings, floors
    from weighin.report.run_json import of_floors
    from weighin.report.writing import write_report
    from weighin.run import runner

    typed = _arguments.read(context)
    _refuse_mixed(context)
    automatic = "auto" if typed["command"] is None else "cgroup"
    _measuring.enter_scope(automatic if typed["isolation"] == "auto" else typed["isolation"])
    if typed["command"] is not None and not _arguments.is_typed(context, "timeout_s"):
        typed["timeout_s"] = (
            0.0  # the search then derives the time-out from the run without a limit
        )
    task = _search(typed)
    _console.note(runner.longest(task))
    folder, json_file = task.folder, typed["json_file"]
    with _progress.progress(_console.err(), None) as progress, runner.resumable("floor", task):
        results = runner.search(task, progress)
    if json_file != _console.STDOUT:
        _console.show(findings.terminal(floors.found(results)))
    files = write_report(folder)
    _console.files(files, json_file)
    if json_file:
        _console.write_json(json_file, of_floors(folder, results, files))
    _measuring.end(context, results)


def _refuse_mixed(context: click.Context) -> None:
    """Raise ConfigError if a command has an option for models, or a model one for commands."""
    if context.params["command"] is not None:
        _arguments.refuse(
            context,
            _OF_MODELS,
            "weighin searches the smallest limit for a command, and loads no model",
            "leave these options out, or leave out -- and the command after it",
        )
    elif not context.params["resume"]:
        _arguments.refuse(
            context,
            _OF_COMMANDS,
            "weighin searches the smallest limit for a model, and runs no command",
            "add the command: weighin floor -- python x.py",
        )


def _search(typed: dict[str, Any]) -> "Run":
    """Return the search in the folder of --resume; without --resume, return a new search."""
    from weighin.cli.run import command_settings
    from weighin.plan import start
    from weighin.records.floor import Aim

    if typed["resume"]:
        task = start.resume(typed["resume"], trusted=typed["trust"], search=True)
    else:
        aim = Aim.ENDS if typed["thrashing"] else Aim.SURVIVES
        more = {"within": _arguments.share(typed["within"]), "aim": aim}
        if typed["command"] is not None:
            settings = command_settings(typed, **more)
        else:
            settings = _arguments.settings(typed, _arguments.one_model(typed), **more)
        task, note = start.start(settings, typed["folder"])
        _console.note(note)
    return replace(task, patience_s=math.inf if typed["wait"] else 0)
