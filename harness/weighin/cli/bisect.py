"""``weighin bisect``: find the release of a package with which a load or command takes more."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from weighin.cli import _console, _options
from weighin.cli._verb import WHAT, WRITE, parameters, verb
from weighin.errors import ConfigError


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
    from weighin.cli import measure
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
        raise ConfigError(
            "weighin bisect needs --package and --from",
            "for example: --package transformers --from 4.48",
        )
    settings = measure.new_settings(context)
    if not settings.commands and len(settings.strategies) > 1:
        raise ConfigError("bisect measures one strategy", "name one: --strategy transformers")
    more = 1 + measure.share(typed["tolerance"])
    with _console.working(f"asking the index for the releases of {package}"):
        known = releases.between(package, typed["from"], typed["to"])
    out = typed["out"] or start.new_folder([f"bisect-{package}"])

    def figure(release: str) -> int | None:
        """Measure a release in a run of its own, in ``out``; None if it cannot be measured."""
        chosen = settings.model_copy(update={"releases": [f"{package}=={release}"]})
        with driver.opened({}) as (_, perform):
            task, _ = start.start(chosen, out / release)
            bar = progress(_console.console(), len(task.planned))
            with measure.until_a_command() if is_of_command else bar as shown:
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
