"""``weighin floor``: find RAM floors."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _arguments, _console, _options, _run
from weighin.cli._verb import Verb

if TYPE_CHECKING:
    from weighin.run.floor_search import Search

EXAMPLES = (
    "weighin floor gpt2-medium",
    "weighin floor gpt2-xl --strategies mmap_assign,streaming --within 2%",
    "weighin floor gpt2-small --isolation cgroup --json -",
    "weighin floor gpt2-small --ranks 1,2,4 -s baseline,mmap_assign",
    "weighin floor --resume results/20261120T093000-gpt2-medium-floor",
)


@click.command(cls=Verb, examples=EXAMPLES, codes=True)
@_options.model
@_options.folder_choice
@_options.generated
@_options.selection
@_options.strategies
@click.option(
    "--within",
    default="1%",
    metavar="SHARE",
    help="Precision: the largest difference between a limit that works and one that does not, in %"
    " of the floor, or 8 MiB if that is more.",
)
@_options.isolation
@_options.device
@_options.dtype
@_options.formats
@_options.ranks
@_options.environment
@_options.timeout(300.0)
@_options.seed
@click.option(
    "--out",
    "folder",
    type=_options.PATH,
    metavar="FOLDER",
    help="The run's folder. Default: results/DATE-MODEL-floor.",
)
@click.option(
    "--resume",
    type=_options.PATH,
    metavar="FOLDER",
    help="Continue the search in this folder where it was stopped.",
)
@_options.trust
@_options.wait
@_options.json
@_options.base_image
@_options.mounts
@click.pass_context
def floor(context: click.Context, /, **_: Any) -> None:
    """Find the smallest RAM limit at which each strategy loads a model, and measure that load."""
    from weighin.cli import _progress
    from weighin.report import terminal_floors, write_report
    from weighin.report.run_json import of_floors
    from weighin.run.request import resumable

    typed = _arguments.read(context)
    _run.enter_scope(typed["isolation"])
    search = _search(typed)
    folder, json_file = search.run.folder, typed["json_file"]
    with (
        _progress.progress(_console.err(), None) as progress,
        resumable("floor", search.run),
    ):
        results = search.perform(progress)
    if json_file != _console.STDOUT:
        _console.show(terminal_floors(results))
    files = write_report(folder)
    _console.files(files, json_file)
    if json_file:
        _console.write_json(json_file, of_floors(folder, results, files))
    _run.end(context, results)


def _search(typed: dict[str, Any]) -> "Search":
    """Return the search to perform, which is a new search or the search to resume."""
    from weighin.run import floor_search

    if typed["resume"]:
        search = floor_search.resume(typed["resume"], trusted=typed["trust"])
    else:
        asked = {
            "models": [_arguments.one_model(typed["model"], typed["model_option"])],
            "passes": 0,
            "ranks": _arguments.names([typed["ranks"]]),
        } | {name: typed[name] for name in ("isolation", "device", "dtype", "timeout_s")}
        if names := _arguments.names(typed["strategies"]):
            asked["strategies"] = names
        if variables := _arguments.environment(typed["env"]):
            asked["environment"] = variables
        if typed["fmt"]:
            asked["format"] = _arguments.names([typed["fmt"]])
        suite = _arguments.read_suite(None, asked)
        request = _arguments.request(typed, suite, within=_arguments.share(typed["within"]))
        search, note = floor_search.start(request)
        if note:
            _console.note(note)
    patience_s = math.inf if typed["wait"] else 0
    return replace(search, run=replace(search.run, patience_s=patience_s))
