"""What there is, as tables: strategies, models, isolations, and the checkpoints made here."""

from collections.abc import Mapping
from datetime import datetime

from rich.markup import escape
from rich.table import Table

from weighin.checkpoint import cache
from weighin.errors import HarnessError, UnknownName
from weighin.isolation import select
from weighin.suite import registry
from weighin.suite.config import read_model
from weighin.units import format_bytes


def tables(kind: str) -> list[Table]:
    """Return the table of one kind, or of all."""
    makers = {
        "strategies": (_loading, _saving),
        "models": (_models,),
        "isolations": (_isolations,),
    }
    if kind != "all" and kind not in makers:
        raise UnknownName("list", kind, [*makers, "all"])
    return [make() for name, made in makers.items() if kind in (name, "all") for make in made]


def cache_table() -> Table:
    """Return the checkpoints that were made here, with their sizes on disk."""
    table = Table("model", "format", "size", "last used", title=f"checkpoints in {cache.folder()}")
    for stored in cache.list_entries():
        used = datetime.fromtimestamp(stored.last_used_s).strftime("%Y-%m-%d %H:%M")
        table.add_row(escape(stored.name), stored.format, format_bytes(stored.size_bytes), used)
    return table


def _loading() -> Table:
    table = Table("strategy", "reads", "loads to", "options", "what it does", title="strategies")
    return _filled(table, registry.strategies())


def _saving() -> Table:
    title = "strategies of saving (--operation save)"
    table = Table("strategy", "writes", "saves from", "options", "what it does", title=title)
    return _filled(table, registry.strategies("save"))


def _filled(table: Table, found: Mapping[str, registry.StrategyInfo]) -> Table:
    for name, info in found.items():
        names = (", ".join(each) for each in (info.formats, info.devices, info.options))
        table.add_row(name, *map(escape, names), escape(info.summary))
    return table


def _models() -> Table:
    table = Table("model", "builder", "arguments", title="models")
    for name, path in registry.models().items():
        spec = read_model(path)
        arguments = ", ".join(f"{key}={value}" for key, value in spec.kwargs.items())
        table.add_row(name, escape(spec.builder), escape(arguments))
    return table


def _isolations() -> Table:
    table = Table("isolation", "works here", title="isolations")
    for name in select.NAMES:
        try:
            select.named(name).check()
            table.add_row(name, "yes")
        except HarnessError as error:
            table.add_row(name, f"no: {escape(error.message)}. {escape(error.repair)}")
    return table
