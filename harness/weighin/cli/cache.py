"""``weighin cache``: list or delete the checkpoints that weighin generated."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _console, _options
from weighin.cli._verb import Verb, Verbs
from weighin.errors import ConfigError, UnknownName
from weighin.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from weighin.checkpoint.cache import CachedCheckpoint

DECLINED_EXIT = 1


@click.command(
    "list",
    cls=Verb,
    examples={
        "List the checkpoints that weighin generated": "weighin cache list",
        "Print JSON": "weighin cache list --json -",
    },
)
@_options.json
def cache_list(json_file: str | None) -> None:
    """List the generated checkpoints, with their sizes on the disk."""
    from weighin.checkpoint import cache

    stored = cache.list_entries()
    document = {"folder": str(cache.folder()), "checkpoints": _described(stored)}
    _console.deliver(json_file, document, lambda: _console.show(_table(stored)))


@click.command(
    "clear",
    cls=Verb,
    codes=True,
    examples={
        "Delete the generated checkpoints of one model": "weighin cache clear gpt2-xl",
        "Delete all generated checkpoints without a question": "weighin cache clear --yes",
    },
)
@click.argument(
    "model",
    required=False,
    help="The model of which to delete the checkpoints. Without MODEL, delete all generated"
    " checkpoints.",
)
@click.option("--yes", "-y", is_flag=True, help="Delete the checkpoints without asking.")
@_options.json
@click.pass_context
def cache_clear(
    context: click.Context, model: str | None, yes: bool, json_file: str | None
) -> None:
    """Delete generated checkpoints after a question. Your own checkpoints are never deleted."""
    from weighin.checkpoint import cache

    chosen = _chosen(model)
    if chosen and not yes and not _is_confirmed(chosen):
        _console.note("nothing was deleted")
        context.exit(DECLINED_EXIT)
    removed = cache.clear(model) if chosen else []
    freed = sum(stored.size_bytes for stored in removed)
    document = {"freed_bytes": freed, "deleted": _described(removed)}
    text = f"deleted {_count(removed)}, freed {format_bytes(freed)}"
    _console.deliver(json_file, document, lambda: _console.line(text))


cache = Verbs(
    "cache",
    help="List or delete the checkpoints that weighin generated.",
    panels={"Commands": ("list", "clear")},
    load={"list": cache_list, "clear": cache_clear}.__getitem__,
    no_args_is_help=True,
)


def _chosen(model: str | None) -> "list[CachedCheckpoint]":
    """Return all cached checkpoints; with ``model``, only those of this model or of this name.

    Raises:
        UnknownName: the cache has no checkpoint of this model or name.
    """
    from weighin.checkpoint import cache

    stored = cache.list_entries()
    chosen = [one for one in stored if model in (None, one.name, one.name.rpartition("-")[0])]
    if model is not None and not chosen:
        raise UnknownName("cached model", model, {one.name.rpartition("-")[0] for one in stored})
    return chosen


def _is_confirmed(chosen: "Sequence[CachedCheckpoint]") -> bool:
    size = format_bytes(sum(stored.size_bytes for stored in chosen))
    if not _has_terminal():
        raise ConfigError(
            f"{_count(chosen)} ({size}) would be deleted, but without a terminal weighin cannot ask"
            " you first",
            "to delete them without a question, add --yes",
        )
    _console.err().print(_table(chosen))
    return click.confirm(f"Delete {_count(chosen)} ({size})?", err=True)


def _has_terminal() -> bool:
    return sys.stdin.isatty()


def _count(stored: "Sequence[CachedCheckpoint]") -> str:
    return f"{len(stored)} checkpoint{'s' * (len(stored) != 1)}"


def _table(stored: "Sequence[CachedCheckpoint]") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    from weighin.checkpoint import cache

    table = Table("model", "format", "size", "last used", box=SIMPLE_HEAD, pad_edge=False)
    table.title = f"checkpoints in {escape(str(cache.folder()))}"
    for one in stored:
        used = datetime.fromtimestamp(one.last_used_s).strftime("%Y-%m-%d %H:%M")
        table.add_row(escape(one.name), one.format, format_bytes(one.size_bytes), used)
    return table


def _described(stored: "Sequence[CachedCheckpoint]") -> list[dict[str, Any]]:
    return [
        {
            "name": one.name,
            "format": one.format,
            "bytes": one.size_bytes,
            "last_used": datetime.fromtimestamp(one.last_used_s, UTC).isoformat(timespec="seconds"),
            "path": str(one.path),
        }
        for one in stored
    ]
