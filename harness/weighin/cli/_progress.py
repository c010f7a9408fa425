"""Show a run's progress: the current cell, the elapsed time, and how many are finished."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from weighin.cell import Cell
from weighin.plan.task import Progress
from weighin.result import Outcome, Result
from weighin.run import interrupts
from weighin.units import format_bytes, format_exact, format_seconds

_REACHED = {"load": "ready", "save": "on the disk", "command": "after"}
_STYLES = {Outcome.OK: "green", Outcome.SKIPPED: "dim"}


@contextmanager
def progress(console: Console, cells: int | None) -> Iterator[Progress]:
    """Show a run's progress, and a line for each finished cell; a search has no number of ``cells``."""
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("starting", total=cells)
        current = ""

        def show(text: str) -> None:
            bar.update(task, description=escape(text))

        def tell(markup: str) -> None:
            # rich prints a line twice if a signal's exception comes after the write and before the
            # clearing of rich's buffer.
            with interrupts.put_off():
                console.print(markup, highlight=False, soft_wrap=True)

        def prepare(text: str, share: float | None = None) -> None:
            show(text if share is None else f"{text}: {share:.0%}")
            if not console.is_terminal and share is None:
                tell(escape(text))

        def start(cell: Cell) -> None:
            nonlocal current
            limits = " and ".join(_limits(cell))
            show(current := f"{cell.strategy} under {limits}" if limits else cell.strategy)

        def finish(result: Result) -> None:
            bar.advance(task)
            tell(line(result))

        yield Progress(
            preparing=prepare,
            starting=start,
            phase=lambda phase: show(f"{current}: {phase}"),
            narrowed=lambda text: tell(f"  [bold]{escape(text)}[/]"),
            finished=finish,
        )


def line(result: Result) -> str:
    """Describe a finished cell in one line of rich markup."""
    cell, style = result.cell, _STYLES.get(result.outcome, "red")
    limit = ", ".join(_limits(cell)) or "no limit"
    words = [f"{escape(cell.model.title)} {escape(cell.strategy):<12} {limit:<9}".lstrip()]
    words.append(f"[{style}]{result.outcome:<12}[/]")
    if result.ready_ns is not None:
        words.append(f"{_REACHED[cell.operation]} {format_seconds(result.ready_ns)}")
    if result.peaks.rss_bytes is not None:
        words.append(f"peak RSS {format_bytes(result.peaks.rss_bytes)}")
    words.append(escape(result.message))
    return "  ".join(word for word in words if word)


def _limits(cell: Cell) -> Iterator[str]:
    if cell.ram_limit_bytes is not None:
        yield format_exact(cell.ram_limit_bytes)
    if cell.vram_limit_bytes is not None:
        yield f"{format_exact(cell.vram_limit_bytes)} of GPU"
    if cell.ranks > 1:
        yield f"{cell.ranks} ranks"
    if cell.use:
        yield f"use {escape(cell.use)}"
    yield from cell.disk
    yield from map(escape, cell.settings)
