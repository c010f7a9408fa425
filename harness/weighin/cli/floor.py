"""The command line's verb that finds RAM floors: ``weighin floor``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from weighin import exit_codes
from weighin.cli import _arguments, _options
from weighin.cli._shared import err, out

EXAMPLES = (
    "Examples:\n\n"
    "weighin floor gpt2-medium\n\n"
    "weighin floor gpt2-xl --strategies mmap_assign,streaming --within 2%\n\n"
    "weighin floor gpt2-small --isolation cgroup --json\n\n"
    "weighin floor --resume results/20261120T093000-gpt2-medium-floor\n\n" + exit_codes.EXPLAINED
)


def floor(
    context: typer.Context,
    model: _options.ModelArgument = None,
    model_option: _options.Model = None,
    kwargs: _options.Kwargs = "{}",
    checkpoint: _options.Checkpoint = None,
    strategies: _options.Strategies = None,
    within: Annotated[
        str, typer.Option(help="How closely: the step in % of the floor, or 8 MiB if larger.")
    ] = "1%",
    isolation: _options.Isolation = "auto",
    device: _options.Device = "cpu",
    dtype: _options.Dtype = "float32",
    fmt: _options.Format = None,
    timeout: _options.Timeout = 300.0,
    seed: _options.Seed = 0,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="The run's folder. Default: results/DATE-MODEL-floor."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with a search where it was stopped.")
    ] = None,
    trust: _options.Trust = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the floors for programs, and nothing else.")
    ] = False,
    base_image: _options.BaseImage = None,
) -> None:
    """Find the smallest RAM limit under which each strategy loads a model, and what life costs there."""
    from weighin.cli import _progress
    from weighin.isolation import delegation, select
    from weighin.records.floor import floors
    from weighin.report import terminal_floors, write_report
    from weighin.report.floors import as_dict
    from weighin.run import floor_search
    from weighin.run import request as bench
    from weighin.suite.config import check_suite

    _arguments.refuse_ignored(context)
    if select.wants_cgroup(isolation) and delegation.helps():
        delegation.enter(sys.argv[1:])
    if resume:
        search = floor_search.resume(resume, trusted=trust)
    else:
        asked = {
            "models": [_arguments.one_model(model, model_option)],
            "isolation": isolation,
            "device": device,
            "dtype": dtype,
            "timeout_s": timeout,
            "passes": 0,
        }
        if names := _arguments.names(strategies or []):
            asked["strategies"] = names
        if fmt:
            asked["format"] = _arguments.names([fmt])
        request = bench.Request(
            suite=check_suite(asked),
            kwargs=_arguments.json_object(kwargs),
            checkpoint=checkpoint,
            seed=seed,
            folder=folder,
            base_image=base_image,
            within=_arguments.share(within),
        )
        search, note = floor_search.start(request)
        if note:
            err.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    task = search.run
    with _progress.progress(err, None) as progress, bench.resumable("floor", task):
        results = search.perform(progress)
    if as_json:
        text = json.dumps({"floors": [as_dict(one) for one in floors(results)]}, indent=1)
        out.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        out.print(terminal_floors(results))
    for path in write_report(task.folder):
        (err if as_json else out).print(str(path), highlight=False, soft_wrap=True)
    for line in exit_codes.broken(results):
        err.print(f"error: {line}", markup=False, highlight=False, soft_wrap=True)
    if code := exit_codes.of_results(results):
        raise typer.Exit(code)
