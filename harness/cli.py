"""The command line: one function a verb. The only place that prints errors or exits.

A verb's module is imported inside its function, so that ``weighin list`` answers at once.
"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from harness import __version__, arguments, checkpoint_verbs
from harness.errors import HarnessError, Interrupted
from harness.gate import verbs as gate_verbs
from harness.record import Outcome, Result

if TYPE_CHECKING:
    from harness.config import Suite

MEASUREMENT_FAILED_EXIT = 4

app = typer.Typer(
    help="Measures what loading a PyTorch checkpoint really costs in memory and time.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(checkpoint_verbs.cache_app, name="cache")
app.command(epilog=checkpoint_verbs.INSPECT_EXAMPLES)(checkpoint_verbs.inspect)
app.command(epilog=checkpoint_verbs.CONVERT_EXAMPLES)(checkpoint_verbs.convert)
app.command(epilog=gate_verbs.CHECK_EXAMPLES)(gate_verbs.check)
out, err = Console(emoji=False), Console(stderr=True, emoji=False)

STRATEGIES_HELP = "Names, or files of your own (./mine.py), divided by commas. Default: all six."


@app.command(
    epilog="Examples:\n\n"
    "weighin bench gpt2-xl --ram 8g --repeats 3\n\n"
    "weighin bench gpt2-medium --ram 4g,2500m --strategies mmap_assign,streaming\n\n"
    "weighin bench --model my.nets:build --kwargs '{\"width\": 64}' --checkpoint w.pt\n\n"
    "weighin bench --resume results/20261120T093000-gpt2-xl-8GiB"
)
def bench(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A model of `weighin list models`. Default: gpt2-small.")
    ] = None,
    model_option: Annotated[
        str | None,
        typer.Option("--model", help="The same, or any model as package.module:callable."),
    ] = None,
    kwargs: Annotated[str, typer.Option(help="The model's arguments, as a JSON object.")] = "{}",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Your own weights. Default: seeded ones, made on demand.")
    ] = None,
    ram: Annotated[
        str, typer.Option(help="RAM limits, divided by commas: 8g, 6500m, none.")
    ] = "none",
    strategies: Annotated[
        list[str] | None, typer.Option("--strategies", "--strategy", "-s", help=STRATEGIES_HELP)
    ] = None,
    isolation: Annotated[str, typer.Option(help="docker, cgroup, process or auto.")] = "auto",
    device: Annotated[str, typer.Option(help="Where the model ends: cpu, cuda, cuda:1.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="What floating-point weights end as: float32, bf16, fp16.")
    ] = "float32",
    cache: Annotated[
        str, typer.Option(help="cold: the checkpoint is in no cache. warm: in the cell's own.")
    ] = "cold",
    fmt: Annotated[
        str | None,
        typer.Option(
            "--format", help="Layouts to load, divided by commas. Default: each strategy's first."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often each cell is measured, interleaved.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds after which a cell is ended.")] = 600.0,
    steady: Annotated[
        bool,
        typer.Option(
            "--steady",
            help="Touch and free memory before each cell: steadier times in virtual machines.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the weights that are made.")] = 0,
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
    base_image: Annotated[
        str | None,
        typer.Option(
            envvar="WEIGHIN_BASE_IMAGE", help="The image that the Docker image is built on."
        ),
    ] = None,
) -> None:
    """Load a model with every strategy, each in its own limited container, and say what it cost."""
    from harness import bench as benchmarks
    from harness import live, runner
    from harness.isolation import choice, delegation

    arguments.refuse_ignored(context)
    if choice.wants_cgroup(isolation) and delegation.helps():
        delegation.enter(sys.argv[1:])
    if resume:
        task = benchmarks.resume(resume)
    else:
        options = {
            "models": [arguments.one_model(model, model_option)],
            "ram": [limit.strip() for limit in ram.split(",")],
            "isolation": isolation,
            "device": device,
            "dtype": dtype,
            "cache": cache,
            "repeats": repeats,
            "timeout_s": timeout,
            "steady": steady,
        }
        if names := arguments.names(strategies or []):
            options["strategies"] = names
        if fmt:
            options["format"] = arguments.names([fmt])
        request = benchmarks.Request(
            suite=_suite(suite, options),
            kwargs=arguments.json_object(kwargs),
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
    with live.progress(err, len(task.planned)) as progress:
        try:
            results = runner.run(task, progress)
        except Interrupted as stopped:
            again = f"weighin bench --resume {shlex.quote(str(task.folder))}"
            raise Interrupted(stopped.message, f"go on with it: {again}") from None
    _report(task.folder, results)
    if any(result.outcome is Outcome.MEASUREMENT_FAILED for result in results):
        raise typer.Exit(MEASUREMENT_FAILED_EXIT)


@app.command(epilog="Example:\n\nweighin report results/20261120T093000-gpt2-xl-8GiB")
def report(run: Annotated[Path, typer.Argument(help="A run's folder.")]) -> None:
    """Draw a run again: the table here, and report.md, summary.csv and the plots in its folder."""
    from harness import journal

    records = journal.read(run)
    for warning in records.warnings:
        _say(warning)
    _report(run, list(records.results))


@app.command("list")
def list_(
    kind: Annotated[
        str, typer.Argument(help="strategies, models or isolations. Default: all three.")
    ] = "all",
) -> None:
    """Say what there is: strategies, models, and ways to isolate."""
    from harness import listing

    for table in listing.tables(kind):
        out.print(table)


@app.command()
def doctor() -> None:
    """Say what this machine can limit and measure; limits and kills a probe to prove it."""
    from harness import doctor as doctors

    table, healthy = doctors.examine(_say)
    out.print(table)
    if not healthy:
        raise typer.Exit(3)


def main() -> None:
    """Run the command line; every error that is ours becomes two lines and an exit code."""
    try:
        app(standalone_mode=True)
    except HarnessError as error:
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


def _report(run: Path, results: list[Result]) -> None:
    from harness.report import terminal_table, write_report

    out.print(terminal_table(results))
    for path in write_report(run):
        out.print(str(path), highlight=False, soft_wrap=True)


def _suite(path: Path | None, options: dict[str, Any]) -> "Suite":
    from harness.config import check_suite, read_suite

    return read_suite(path) if path else check_suite(options)
