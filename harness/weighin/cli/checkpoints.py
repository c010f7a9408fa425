"""The command line's verbs that work on checkpoints: ``weighin inspect|convert|cache``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from weighin.cli._shared import err, out
from weighin.units import format_bytes

CONVERT_EXAMPLES = (
    "Examples:\n\n"
    "weighin convert model.pt parts --format per_param\n\n"
    "weighin convert model.pt model-bf16.safetensors --dtype bf16 --verify\n\n"
    "weighin convert model.pt shards --format sharded --max-shard-size 2GiB"
)

INSPECT_EXAMPLES = (
    "Examples:\n\n"
    "weighin inspect model.pt\n\n"
    "weighin inspect shards --sort size --all\n\n"
    "weighin inspect model.safetensors --json"
)

cache_app = typer.Typer(help="The checkpoints that were made here.", no_args_is_help=True)


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint of any layout; it is only read.")],
    target: Annotated[Path, typer.Argument(help="The file or folder to make; must not exist.")],
    fmt: Annotated[
        str,
        typer.Option(
            "--format",
            help="pt, safetensors, sharded, per_module, per_param, dcp ... or auto: one safetensors"
            " file, but shards where the tensors, as written, take more than --split-above.",
        ),
    ] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="Of floating-point tensors: bf16, fp16, fp32. Default: as they are."),
    ] = None,
    split_above: Annotated[
        str, typer.Option(help="With auto: the size above which one file becomes several.")
    ] = "5GiB",
    max_shard_size: Annotated[
        str, typer.Option(help="With shards: how large each becomes, unless one tensor is larger.")
    ] = "5GiB",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read the result back and compare every checksum. Leaves them with the result:"
            " whoever converts it compares what is read with them.",
        ),
    ] = False,
) -> None:
    """Write a checkpoint again in another layout or dtype; holds a few pieces of 16 MiB, no more."""
    from weighin.checkpoint import convert_request

    wish = convert_request.Wish(source, target, fmt, dtype, split_above, max_shard_size, verify)
    out.print(convert_request.convert(wish, err), markup=False, highlight=False, soft_wrap=True)


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of any layout.")],
    sort: Annotated[str, typer.Option(help="The tensors' order: file, name or size.")] = "file",
    show_all: Annotated[bool, typer.Option("--all", help="Every tensor, however many.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All of it, for programs.")] = False,
) -> None:
    """Say what is in a checkpoint and what a load should need; executes and loads nothing of it."""
    from weighin.checkpoint import inspect as inspecting

    found = inspecting.inspect(checkpoint)
    if as_json:
        print(json.dumps(found.as_json()))
        return
    for part in inspecting.tables(found, sort=sort, show_all=show_all):
        markup = not isinstance(part, str)
        out.print(part, markup=markup, highlight=False, soft_wrap=not markup)


@cache_app.command("list")
def cache_list() -> None:
    """Show the checkpoints that were made here, and how much disk they take."""
    from weighin.cli import _listing

    out.print(_listing.cache_table())


@cache_app.command("clear", epilog="Example:\n\nweighin cache clear gpt2-xl")
def cache_clear(
    name: Annotated[str | None, typer.Argument(help="A model's name. Default: all.")] = None,
) -> None:
    """Delete checkpoints that were made here; your own files are never touched."""
    from weighin.checkpoint import cache

    freed = sum(stored.size_bytes for stored in cache.clear(name))
    out.print(f"freed {format_bytes(freed)}", highlight=False)
