"""``weighin doctor``: what this machine can limit and measure."""

import click

from weighin.cli import _console, _options
from weighin.cli._verb import Verb

NO_LIMIT_EXIT = 3


@click.command(
    cls=Verb, codes=True, examples=("weighin doctor", "weighin doctor --calibrate --json -")
)
@click.option(
    "--calibrate",
    is_flag=True,
    help="Measure how fast this machine reads, copies and allocates, so that `weighin recommend`"
    " can predict times.",
)
@_options.json
@click.pass_context
def doctor(context: click.Context, calibrate: bool, json_file: str | None) -> None:
    """Test which limits this machine can enforce, and which figures it can measure.

    In each isolation, a probe process allocates more memory than its limit, to test that the kernel
    enforces the limit. Leftovers of killed runs, such as containers, are removed. The exit code is
    3 if no isolation enforces a limit.
    """
    from weighin.doctor import doctor as doctors

    examination = doctors.examine(_console.note)
    tables, document = [doctors.table(examination)], examination.as_json()
    if calibrate:
        from dataclasses import asdict

        from weighin.recommend import calibration

        measured = calibration.calibrate(_console.note)
        tables.append(calibration.table(measured))
        document["calibration"] = asdict(measured)
    if json_file != _console.STDOUT:
        _console.show(*tables)
    if json_file:
        _console.write_json(json_file, document)
    if not examination.holds_a_limit:
        context.exit(NO_LIMIT_EXIT)
