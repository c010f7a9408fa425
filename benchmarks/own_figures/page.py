"""Write the page of the instrument's own figures: three tables, and what each figure means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

from own_figures import amounts, cells, sampling
from own_figures.amounts import Amounts
from own_figures.cells import CellCost, Costs
from own_figures.sampling import Sampled
from own_figures.spread import Spread, largest_error
from weighin.report import captions
from weighin.report.markdown import table_lines
from weighin.units import GIB, MIB, format_bytes

_PARTS: Final = ("before_ns", "checks_ns", "after_ns", "added_ns", "load_ns", "cpu_ns")
_PROGRAMS: Final = """
* `spend 256 MS`: 64 MiB from its start to its end, and 256 MiB more for MS milliseconds.
* `forks 128 3 2000`: 128 MiB, and three forked processes that each overwrite half of them, for 2 s.
* `maps FILE`: maps a file of 128 MiB twice, reads all of both maps, and changes half of the private one: 64 MiB of its own.
* `shares 48 2000`: two processes that share 96 MiB, for 2 s.
* `child 256 2000`: 8 MiB, and a child, another program, with 256 MiB, for 2 s.
"""
_WAYS: Final = {
    amounts.WEIGHIN["cgroup"]: "what `weighin run --isolation cgroup` says that the command needs: the larger of the largest"
    " sample (every 20 ms), and of the kernel's exact peak of the cgroup minus page cache and the kernel's own memory.",
    amounts.WEIGHIN["process"]: "the same with `--isolation process`. Without a cgroup the kernel keeps no peak of several"
    " processes, so the figure is sampled (PSS, every 20 ms): a shorter peak is missed.",
    amounts.MAX_RSS: "the maximum resident set size that `/usr/bin/time -v` prints: the kernel's exact mark of the largest single"
    " process (`wait4`). It counts mapped page cache as memory of the process, and adds up no processes.",
    amounts.NOTEBOOK: "the largest of psutil's readings of the RSS of the command's first process, every 100 ms by a thread, as"
    " the notebook samples. The thread runs in another process here, which favours it: in the notebook, it waits for the"
    " GIL. Each program starts at a random moment between two readings.",
}  # fmt: skip


def text(
    costs: Costs, sampled: Sequence[Sampled], known: Amounts, *, seconds: float, load_average: float
) -> str:
    """Return the whole page; ``load_average`` is that of the minute before the measurement."""
    repeats = len(costs.python_ns)
    parts = (
        _head(costs, repeats, load_average),
        _of_cells(costs, repeats),
        _of_samplers(sampled, seconds),
        _of_amounts(known),
    )
    return "\n".join(line for part in parts for line in part)


def _head(costs: Costs, repeats: int, load_average: float) -> Iterator[str]:
    about = costs.environment
    words = [
        *captions.machine([about]),
        f"{about['cpus']} processors",
        f"{format_bytes(about['ram_bytes'], digits=1)} of RAM",
        f"Python {about['python']}",
        f"psutil {version('psutil')}",
        f"weighin {about['weighin']}",
        captions.when_and_what([(about, datetime.now(UTC).isoformat())]),
    ]
    yield "# What the instrument costs, and how true its figures are\n"
    yield "`make self-bench` wrote this page. It measures weighin itself: the time that weighin adds to each load, the time and the"
    yield "gaps of its sampler, and the figures that weighin and other tools give for programs whose memory is known.\n"
    yield f"{' · '.join(words)}\n"
    how = (
        "Each load and program ran once"
        if repeats == 1
        else f"Medians of {repeats} interleaved repeats, with the whole range in parentheses where it differs"
    )
    yield f"{how}. Over the minute before the"
    yield f"measurement, the machine's load average was {load_average:.2f}; 0 is an idle machine.\n"


def _of_cells(costs: Costs, repeats: int) -> Iterator[str]:
    heads = (
        "isolation", "before s", "checks s", "after s", "added s", "the load itself s", "processor s",
    )  # fmt: skip
    python = Spread.of(costs.python_ns).text(1e9, 3)
    yield "## What weighin adds to a load\n"
    yield f"weighin loaded {cells.MODEL} ({costs.model_bytes / GIB:.3f} GiB) with the strategy `{cells.STRATEGY}` from a cold page cache, without a"
    yield f"RAM limit, {_times(repeats)} in each isolation.\n"
    rows = [[name, *map(_seconds, _columns(each))] for name, each in costs.by_isolation.items() if each]  # fmt: skip
    yield from table_lines(heads, rows, names=1)
    yield ""
    yield from _refusals(costs.refused)
    yield "* **before**: from the beginning of the cell until the worker imports torch. The parent evicts the checkpoint from the page cache, and"
    yield f"  starts the container, the cgroup or the process, with a fresh Python. An empty Python program takes {python} s here."
    yield "* **checks**: the worker reads every byte of the model, compares the checksums, and waits at the boundaries of phases. These times"
    yield "  grow with the model. Reading every byte is a part of the column `ready` of a report, and never of `load`."
    yield "* **after**: from the end of the worker's last phase until its isolation is removed, and the record and the samples are written."
    yield "* **added**: the sum of the three. **the load itself**: the import of torch, the load, and the forward pass."
    yield "* **processor**: the processor time of weighin's own process during the whole cell, with its sampler. The time of the worker is not"
    yield "  in it, nor is the time of the Docker engine.\n"


def _columns(costs: Sequence[CellCost]) -> list[Spread]:
    return [Spread.of([getattr(one, part) for one in costs]) for part in _PARTS]


def _seconds(spread: Spread) -> str:
    return spread.text(1e9, 2)


def _of_samplers(found: Sequence[Sampled], seconds: float) -> Iterator[str]:
    held = sampling.BASE_MIB + sampling.SPIKE_MIB
    heads = ["samples of", "isolation", "interval"]
    for state in ("idle", "busy"):
        heads += [f"{state}: share", "median ms", "99 % ms", "largest ms"]
    yield "## The sampler\n"
    yield f"Each sampler read the memory of a process that holds {held} MiB and sleeps, for {seconds:g} s at each interval. weighin samples a load every"
    yield "5 ms and a command every 20 ms. In a container, the parent samples as in a cgroup.\n"
    yield from table_lines(heads, _sampler_rows(found), names=2)
    yield ""
    yield "* **share**: the processor time of the sampler, as a share of one processor."
    yield "* **median, 99 %, largest**: the gaps, each from the beginning of one sample to that of the next; 99 % of the gaps are no longer than"
    yield "  the second figure. A peak that is shorter than a gap can fall between two samples. The kernel's high-water marks have no gaps: samples"
    yield "  draw the timeline and split the memory, and peaks come from the marks."
    yield "* **idle**: nothing else ran. **busy**: one program for each processor computed without end."
    yield "* Without a cgroup, a command's figure is a sum of PSS, for which the kernel walks through the memory of each process. weighin"
    yield "  reads it less often then, so that it takes only a share of the time.\n"


def _sampler_rows(found: Sequence[Sampled]) -> Iterator[list[str]]:
    busy = {(one.body, one.isolation, one.interval_ms): one for one in found if one.is_busy}
    for one in found:
        if not one.is_busy:
            key = (one.body, one.isolation, one.interval_ms)
            both = (one, busy[key])
            figures = [figure for each in both for figure in _sampler_figures(each)]
            yield [f"a {one.body}", one.isolation, f"{one.interval_ms} ms", *figures]


def _sampler_figures(one: Sampled) -> list[str]:
    gaps = (one.gaps.median_ns, one.gaps.most_ns, one.gaps.largest_ns)
    return [f"{one.share:.1%}", *(f"{gap / 1e6:.1f}" for gap in gaps)]


def _of_amounts(found: Amounts) -> Iterator[str]:
    ways = list(found.figures[found.known[0].id])
    rows = [
        [one.id, f"{one.needed_bytes / MIB:.0f}", *(Spread.of(found.figures[one.id][way]).text(MIB, 1) for way in ways)]
        for one in found.known
    ]  # fmt: skip
    worst = [
        largest_error([(figure, one.needed_bytes) for one in found.known for figure in found.figures[one.id][way]])
        for way in ways
    ]  # fmt: skip
    rows.append(["largest error", "", *(f"{error:+.1%}" for error in worst)])
    yield "## Programs whose memory is known\n"
    yield "C programs take a [known amount](../tests/known_commands.py) of anonymous and shared memory. Without swap, the kernel cannot take this memory"
    yield "back, so it is what the program needs. Page cache is no need. All figures are MiB.\n"
    yield from table_lines(("program", "known", *ways), rows, names=1)
    yield _PROGRAMS
    yield from _refusals(found.refused)
    for way in ways:
        yield f"* **{way}**: {_WAYS.get(way) or _optimum(found)}"
    yield "* **largest error**: the figure of one repeat that is furthest from its program's known amount."
    yield ""


def _optimum(found: Amounts) -> str:
    return (
        f"the `MemoryTracker` of {found.optimum}, as it is, in a process of its own. It is made to follow the process that calls it;"
        " here it is given the pid of the command's first process."
    )


def _refusals(refused: Mapping[str, str]) -> Iterator[str]:
    for name, why in refused.items():
        yield f"* {name} is not in the table: {why}"


def _times(repeats: int) -> str:
    return "once" if repeats == 1 else f"{repeats} times"
