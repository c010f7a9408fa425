"""``weighin inspect``: what is in a checkpoint."""

from pathlib import Path

import click

from weighin.cli import _console, _options
from weighin.cli._verb import Argument, Verb

EXAMPLES = (
    "weighin inspect model.pt",
    "weighin inspect shards --sort size --all",
    "weighin inspect training.pt --key model",
    "weighin inspect model.safetensors --json -",
)


@click.command(cls=Verb, examples=EXAMPLES)
@click.argument("checkpoint", cls=Argument, type=_options.PATH, help="A checkpoint in any format.")
@click.option(
    "--sort", default="file", metavar="ORDER", help="Order of the tensors: file, name or size."
)
@click.option("--all", "show_all", is_flag=True, help="Show every tensor, however many there are.")
@_options.selection
@_options.json
def inspect(
    checkpoint: Path,
    sort: str,
    show_all: bool,
    key: str,
    strip_prefix: str,
    json_file: str | None,
) -> None:
    """List the tensors of a checkpoint, and estimate the memory of loading it.

    The command reads no tensor data, executes no code from the checkpoint, and does not import
    torch.
    """
    from weighin.checkpoint import inspect as inspecting
    from weighin.formats.pretrained_folder import path_of
    from weighin.formats.selection import Selection

    inspected = inspecting.inspect(path_of(checkpoint), Selection(key, strip_prefix))
    if json_file != _console.STDOUT:
        console = _console.out()
        for part in inspecting.tables(inspected, sort=sort, show_all=show_all):
            is_table = not isinstance(part, str)
            console.print(part, markup=is_table, highlight=False, soft_wrap=not is_table)
    if json_file:
        _console.write_json(json_file, inspected.as_json())
