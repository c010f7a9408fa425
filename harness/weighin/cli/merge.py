"""``weighin merge``: join the runs of several shards."""

from pathlib import Path

import click

from weighin.cli import _console, _options
from weighin.cli._verb import Verb

EXAMPLES = {
    "Join the runs of two machines that measured parts of one suite": "weighin merge results/shard-1 results/shard-2 --out results/whole",
    "Join all parts, and print JSON": "weighin merge results/shard-* --out results/whole --json -",
}


@click.command(cls=Verb, examples=EXAMPLES)
@click.argument(
    "runs",
    type=_options.PATH,
    nargs=-1,
    required=True,
    help="Folders of runs with the same plan, such as the shards of `weighin bench --shard`.",
)
@click.option(
    "--out",
    "folder",
    type=_options.PATH,
    required=True,
    metavar="FOLDER",
    help="The folder into which weighin writes the new run; the folder must not contain a run yet.",
)
@_options.json
def merge(runs: tuple[Path, ...], folder: Path, json_file: str | None) -> None:
    """Join the records of several runs of one plan, such as the runs of --shard, into a new run.

    The new run has the whole plan, so that `weighin bench --resume` or `weighin run --resume` can
    make the measurements that no joined run has made. `weighin merge` refuses runs with different
    plans. `weighin merge` also refuses two runs with a record of the same measurement, because it
    cannot tell which of the two counts.
    """
    from weighin.run import merge as merging

    merged = merging.merge(runs, folder)
    _console.note(*merged.warnings)
    planned = len(merged.results) + len(merged.missing)
    text = f"{folder}: {len(merged.results)} of {planned} cells (measurements) are measured"
    _console.deliver(json_file, merged.as_json(), lambda: _console.line(text))
    if merged.missing:
        shards = ", ".join(map(str, merged.missing_shards))
        _console.note(
            f"missing: {len(merged.missing)} cells"
            + (f"; no run of shard {shards} was given" if shards else "")
            + f"; {merged.again} measures them"
        )
