"""``weighin doctor``: test what this machine can limit and measure."""

from typing import Any

import click

from weighin.cli import _arguments, _console, _options
from weighin.cli._verb import Verb

NO_LIMIT_EXIT = 3


@click.command(
    cls=Verb,
    codes=True,
    examples=(
        "weighin doctor",
        "weighin doctor --calibrate --json -",
        "weighin doctor --clean",
        "weighin doctor --engine ray --address head:6379",
    ),
)
@click.option(
    "--calibrate",
    is_flag=True,
    help="Measure how fast this machine reads, copies and allocates, so that `weighin recommend`"
    " can predict times.",
)
@click.option(
    "--clean",
    is_flag=True,
    help="Also remove the leftovers of killed runs that used another lock file than this command"
    " (environment variable WEIGHIN_LOCK).",
)
@_options.engine
@_options.json
@click.pass_context
def doctor(context: click.Context, /, **typed: Any) -> None:
    """Test which limits this machine can enforce, and which figures it can measure.

    In each isolation, a probe process allocates more memory than its limit, to test that the kernel
    enforces the limit. The command also removes leftovers of killed runs, such as containers. The
    exit code is 3 if no isolation enforces a limit.

    With --engine ray, the command tests each node of the cluster. The exit code is then 3 if a node
    cannot measure.
    """
    from weighin.engines import base

    json_file = typed["json_file"]
    if settings := base.settings(typed["engine"], typed["address"], typed["labels"]):
        ignored, reason = ("calibrate", "clean"), "--engine ray tests the cluster, not this machine"
        _arguments.refuse(context, ignored, reason, "leave out --engine ray")
        _examine_fleet(context, settings, json_file)
        return
    from weighin.doctor import doctor as doctors

    examination = doctors.examine(_console.note, clean=typed["clean"])
    tables, document = [doctors.table(examination)], examination.as_json()
    if typed["calibrate"]:
        from dataclasses import asdict

        from weighin.recommend import calibration

        measured = calibration.calibrate(_console.note)
        tables.append(calibration.table(measured))
        document["calibration"] = asdict(measured)
    _console.deliver(json_file, document, lambda: _console.show(*tables))
    if not examination.holds_a_limit:
        context.exit(NO_LIMIT_EXIT)


def _examine_fleet(context: click.Context, settings: dict[str, Any], json_file: str | None) -> None:
    from weighin.engines.ray import doctor as doctors

    nodes = doctors.examine(settings["address"], settings["labels"], _console.note)
    shown = [doctors.table(node) for node in nodes]
    document = {"nodes": [node.as_json() for node in nodes]}
    _console.deliver(json_file, document, lambda: _console.show(*shown))
    if not all(node.can_measure for node in nodes):
        context.exit(NO_LIMIT_EXIT)
