"""The command line: one function a verb. The only place that prints errors or exits.

A verb's module is imported inside its function, so that ``weighin list`` answers at once.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from weighin import __version__, exit_codes
from weighin.cli import _arguments, _options, checkpoints, floor, gates, predict, recommend, reports
from weighin.cli._shared import err, out
from weighin.errors import HarnessError, explain

if TYPE_CHECKING:
    from weighin.suite.config import Suite

app = typer.Typer(
    help="Measures what loading a PyTorch checkpoint really costs in memory and time.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(checkpoints.cache_app, name="cache")
app.command(epilog=checkpoints.INSPECT_EXAMPLES)(checkpoints.inspect)
app.command(epilog=checkpoints.CONVERT_EXAMPLES)(checkpoints.convert)
app.command(epilog=gates.CHECK_EXAMPLES)(gates.check)
app.command(epilog=floor.EXAMPLES)(floor.floor)
app.command(epilog=reports.REPORT_EXAMPLES)(reports.report)
app.command(epilog=reports.HISTORY_EXAMPLES)(reports.history)
app.command(epilog=predict.PREDICT_EXAMPLES)(predict.predict)
app.command(epilog=gates.COMPARE_EXAMPLES)(gates.compare)
app.command(epilog=recommend.RECOMMEND_EXAMPLES)(recommend.recommend)


@app.command(
    epilog="Examples:\n\n"
    "weighin bench gpt2-xl --ram 8g --repeats 3\n\n"
    "weighin bench gpt2-medium --ram 4g,2500m --strategies mmap_assign,streaming\n\n"
    "weighin bench gpt2-large --operation save --ram 8g\n\n"
    "weighin bench gpt2-medium --device cuda --vram 1g --trace\n\n"
    "weighin bench --model my.nets:build --kwargs '{\"width\": 64}' --checkpoint w.pt\n\n"
    "weighin bench --resume results/20261120T093000-gpt2-xl-8GiB\n\n" + exit_codes.EXPLAINED
)
def bench(
    context: typer.Context,
    model: _options.ModelArgument = None,
    model_option: _options.Model = None,
    kwargs: _options.Kwargs = "{}",
    checkpoint: _options.Checkpoint = None,
    ram: Annotated[
        str, typer.Option(help="RAM limits, divided by commas: 8g, 6500m, none.")
    ] = "none",
    ram_high: Annotated[
        str,
        typer.Option(
            help="Soft limit, above which cells are slowed down, and crawl to their time-out where "
            "they cannot give memory up: cgroup v2 only."
        ),
    ] = "none",
    strategies: _options.Strategies = None,
    operation: Annotated[
        str, typer.Option(help="load, or save: write the model with every strategy of saving.")
    ] = "load",
    isolation: _options.Isolation = "auto",
    device: _options.Device = "cpu",
    dtype: _options.Dtype = "float32",
    cache: Annotated[
        str, typer.Option(help="cold: the checkpoint is in no cache. warm: in the cell's own.")
    ] = "cold",
    fmt: _options.Format = None,
    first_use: Annotated[str | None, typer.Option(hidden=True)] = None,  # refused: --passes
    passes: Annotated[
        int,
        typer.Option(
            help="Forward passes after the load, 0 for none; below its size a mapped model is read in each."
        ),
    ] = 1,
    repeats: Annotated[int, typer.Option(help="How often each cell is measured, interleaved.")] = 1,
    timeout: _options.Timeout = 600.0,
    vram: Annotated[
        str, typer.Option(help="Limits of the GPU's memory, as --ram: 8g, none.")
    ] = "none",
    trace: Annotated[
        bool, typer.Option("--trace", help="Keep every event of the GPU's allocator: traces/.")
    ] = False,
    steady: Annotated[
        bool,
        typer.Option(
            "--steady",
            help="Give memory back as each load begins: steadier times in virtual machines.",
        ),
    ] = False,
    seed: _options.Seed = 0,
    suite: Annotated[
        Path | None, typer.Option(help="A YAML matrix instead of the options above.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="The run's folder. Default: results/DATE-MODEL-RAM."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with a run at its first cell without a record.")
    ] = None,
    trust: _options.Trust = False,
    base_image: _options.BaseImage = None,
) -> None:
    """Load or save a model with every strategy, each in its own limited container: what did it cost?"""
    from weighin.cli import _progress
    from weighin.isolation import delegation, select
    from weighin.run import request as benchmarks
    from weighin.run import runner
    from weighin.run.request import resumable

    _arguments.refuse_ignored(context)
    if select.wants_cgroup(isolation) and delegation.helps():
        delegation.enter(sys.argv[1:])
    if resume:
        task = benchmarks.resume(resume, trusted=trust)
    else:
        asked = {
            "models": [_arguments.one_model(model, model_option)],
            "operation": operation,
            "ram": [limit.strip() for limit in ram.split(",")],
            "vram": [limit.strip() for limit in vram.split(",")],
            "ram_high": ram_high,
            "isolation": isolation,
            "device": device,
            "dtype": dtype,
            "cache": cache,
            "passes": passes,
            "repeats": repeats,
            "timeout_s": timeout,
            "steady": steady,
            "trace": trace,
        }
        if names := _arguments.names(strategies or []):
            asked["strategies"] = names
        if first_use:
            asked["first_use"] = first_use
        if fmt:
            asked["format"] = _arguments.names([fmt])
        request = benchmarks.Request(
            suite=_suite(suite, asked),
            kwargs=_arguments.json_object(kwargs),
            checkpoint=checkpoint,
            seed=seed,
            folder=folder,
            base_image=base_image,
        )
        task, note = benchmarks.start(request)
        if note:
            _say(note)
    if not task.isolation.limits or all(one.cell.ram_limit_bytes is None for one in task.planned):
        _say("nothing is limited: peaks are measured, but no strategy is shown to fit (--ram does)")
    with _progress.progress(err, len(task.planned)) as progress, resumable("bench", task):
        results = runner.run(task, progress)
    reports.show(task.folder, results)
    for line in exit_codes.broken(results):
        err.print(f"error: {line}", markup=False, highlight=False, soft_wrap=True)
    if code := exit_codes.of_results(results):
        raise typer.Exit(code)


@app.command("list")
def list_(
    kind: Annotated[
        str, typer.Argument(help="strategies, models or isolations. Default: all three.")
    ] = "all",
) -> None:
    """Say what there is: strategies, models, and ways to isolate."""
    from weighin.cli import _listing

    for table in _listing.tables(kind):
        out.print(table)


@app.command()
def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure how fast this machine reads and copies.")
    ] = False,
) -> None:
    """Say what this machine can limit and measure; limits and kills a probe to prove it."""
    from weighin.doctor import doctor as doctors

    table, healthy = doctors.examine(_say)
    out.print(table)
    if calibrate:
        from weighin.recommend import calibration

        out.print(calibration.table(calibration.calibrate(_say)))
    if not healthy:
        raise typer.Exit(3)


def main() -> None:
    """Run the command line; every error that is ours becomes two lines and an exit code."""
    try:
        app(standalone_mode=True)
    except HarnessError as error:
        _end(error)
    except OSError as error:
        _end(explain(error))


def _end(error: HarnessError) -> NoReturn:
    err.print("[bold red]error:[/]", end=" ")
    err.print(error.message, markup=False, highlight=False, soft_wrap=True)
    if error.repair:
        err.print(error.repair, markup=False, highlight=False, soft_wrap=True)
    sys.exit(error.exit_code)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"weighin {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Measures what loading a PyTorch checkpoint really costs in memory and time."""


def _say(text: str) -> None:
    err.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


def _suite(path: Path | None, asked: dict[str, Any]) -> "Suite":
    from weighin.suite.config import check_suite, read_suite

    return read_suite(path) if path else check_suite(asked)
