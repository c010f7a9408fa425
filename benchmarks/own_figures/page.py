"""Write the page of the instrument's own figures: three tables, and what each figure means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

from own_figures import amounts, cells, sampling
from own_figures.amounts import Amounts
from own_figures.cells import CellCost, Costs
from own_figures.sampling import Sampled
from own_figures.spread import Spread, errors
from weighin.show import words
from weighin.show.table import Table
from weighin.units import GIB, MIB, format_bytes

_PAGE: Final = """\
# What the instrument costs, and how true its figures are

`make self-bench` measured weighin itself, and wrote this page.

{machine}

{how_often}. In the minute before the
measurements, the machine's load average was {load_average:.2f}.

## What weighin adds to a load

weighin loaded {model} ({model_gib:.3f} GiB) with the strategy `{strategy}`, from a cold page cache and without a RAM limit. "isolation" tells
how weighin ran the measured process. The first load in each isolation is not counted, because weighin then imports its modules.

{cells}

* **before**: the time until the measured process imports torch. weighin first evicts the checkpoint from the page cache, and starts the process.
  For comparison, an empty Python program takes {python} s.
* **checks**: the time in which the process reads every byte of the model, compares checksums, and waits between phases (parts). The figure `ready`
  of other pages includes the reading, and `load` does not. This time grows with the model's size.
* **after**: the time from the end of the last phase until weighin has removed the process, cgroup or container, and written the figures.
* **added**: the sum of "before", "checks" and "after".
* **the load itself**: the time of importing torch, the load, and the forward pass.
* **processor**: the processor time of weighin's own process, with its sampler, without the measured process and the Docker engine.

## The samplers

A sampler reads the memory of a process at regular intervals: by default every 5 ms for a load, and every 20 ms for a command. Here, each sampler
watched a sleeping process of {held_mib} MiB for {seconds:g} s.

{samplers}

* **share**: the processor time of the sampler, as a share of one processor. Without a cgroup, a command's memory is the sum of its processes' PSS
  (proportional set sizes), for which the kernel walks through all pages.
* **median, 99 %, largest**: the gaps from the beginning of one sample to that of the next. 99 % of the gaps are at most as long as "99 %".
* Of two figures in one field, the first is from an idle machine, and the second from one whose processors were all busy.

Because a short memory peak can fall between two samples, weighin reads peaks from the kernel's high-water marks.

## Programs whose memory is known

C programs take a [known amount](../tests/known_commands.py) of anonymous and shared memory. All figures are in MiB.

{amounts}

* `spend 256 MS` holds 64 MiB, and 256 MiB more for MS milliseconds plus the time in which the kernel clears these pages.
* `forks 128 3 2000` holds 128 MiB, and forks three processes for 2 s, of which each overwrites half of this memory.
* `maps FILE` maps a file of 128 MiB twice, shared and private, reads both mappings, and overwrites half of the private one, which makes private
  copies of 64 MiB.
* `shares 48 2000` is two processes, which share 96 MiB for 2 s.
* `child 256 2000` holds 8 MiB, and starts another program, which holds 256 MiB for 2 s.

Each further column shows what a tool measured:

{tools}

The row "errors" has each tool's lowest and highest error in all repeats, as a share of the known amount.
"""
_PARTS: Final = ("before_ns", "checks_ns", "after_ns", "added_ns", "load_ns", "cpu_ns")
_CELL_HEADS: Final = ("isolation", "before s", "checks s", "after s", "added s", "the load itself s", "processor s")  # fmt: skip
_SAMPLER_HEADS: Final = (
    "samples of",
    "isolation",
    "interval",
    "share",
    "median ms",
    "99 % ms",
    "largest ms",
)
_TOOLS: Final = {
    amounts.WEIGHIN["cgroup"]: """\
the need according to `weighin run --isolation cgroup`: the larger of the largest sample (every 20 ms), and the exact peak minus
  the largest page cache and kernel memory.""",
    amounts.WEIGHIN["process"]: """\
the need according to `weighin run --isolation process`: the largest sample (PSS, every 20 ms), which misses shorter peaks.""",
    amounts.MAX_RSS: """\
the maximum resident set size, which `wait4` returns and `/usr/bin/time -v` prints: the kernel's exact peak of the largest process.
  `ru_maxrss` counts mapped page cache, and does not add up processes.""",
    amounts.NOTEBOOK: """\
the largest RSS of the command's first process, sampled as in [the notebook](predicting.md#the-notebooks-gpu-column) with which
  weighin began. The notebook samples in a thread of the measured process, which waits for the GIL. Here, the thread runs in another process, so its
  gaps are shorter.""",
    amounts.OPTIMUM: """\
the `MemoryTracker` of {optimum}, unchanged, in its own process. It follows only
  the command's first process.""",
}


def text(
    costs: Costs, sampled: Sequence[Sampled], known: Amounts, *, seconds: float, load_average: float
) -> str:
    """Return the whole page; ``load_average`` is that of the minute before the measurement."""
    repeats = len(costs.python_ns)
    return _PAGE.format(
        machine=_machine(costs.environment),
        how_often="Each load and each program ran once"
        if repeats == 1
        else f"Figures are medians of {repeats} interleaved repeats; if the repeats differ, their range follows in parentheses",
        load_average=load_average,
        model=cells.MODEL,
        model_gib=costs.model_bytes / GIB,
        strategy=cells.STRATEGY,
        cells=_lines(_CELL_HEADS, _cell_rows(costs), 1, costs.refused),
        python=Spread.of(costs.python_ns).text(1e9, 3),
        held_mib=sampling.BASE_MIB + sampling.SPIKE_MIB,
        seconds=seconds,
        samplers=_lines(_SAMPLER_HEADS, _sampler_rows(sampled), 2),
        amounts=_lines(("program", "known", *known.tools), _amount_rows(known), 1, known.refused),
        tools="\n".join(
            f"* **{tool}**: {_TOOLS[tool].format(optimum=known.optimum)}" for tool in known.tools
        ),
    )


def _machine(about: Mapping[str, object]) -> str:
    ram_bytes = about["ram_bytes"]
    assert isinstance(ram_bytes, int)
    about_it = [
        *words.machine([about]),
        f"{about['cpus']} processors",
        f"{format_bytes(ram_bytes, digits=1)} of RAM",
        f"Python {about['python']}",
        f"psutil {version('psutil')}",
        f"weighin {about['weighin']}",
        f"measured {words.when_and_what([(about, datetime.now(UTC).isoformat())])}",
    ]
    return " · ".join(about_it)


def _lines(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    names: int,
    refused: Mapping[str, str] | None = None,
) -> str:
    """Return a table, and below it the reason for each line or column that it lacks."""
    reasons = [f"\nThe table lacks {name}: {why}." for name, why in (refused or {}).items()]
    return "\n".join([Table.of(heads, rows, names=names).markdown(), *reasons])


def _cell_rows(costs: Costs) -> list[list[str]]:
    return [
        [isolation, *(_part(found, part).text(1e9, 2) for part in _PARTS)]
        for isolation, found in costs.by_isolation.items()
        if found
    ]


def _part(found: Sequence[CellCost], part: str) -> Spread:
    return Spread.of([getattr(one, part) for one in found])


def _sampler_rows(sampled: Sequence[Sampled]) -> list[list[str]]:
    """Return a row for each sampler and interval: the figures on the idle machine, then on the busy one."""
    found: dict[tuple[str, str, int], list[Sampled]] = {}
    for one in sampled:
        found.setdefault((one.body, one.isolation, one.interval_ms), []).append(one)
    return [
        [f"a {body}", isolation, f"{interval_ms} ms", *map(" / ".join, zip(*map(_figures, both), strict=True))]
        for (body, isolation, interval_ms), both in found.items()
    ]  # fmt: skip


def _figures(one: Sampled) -> list[str]:
    gaps = (one.gaps.median_ns, one.gaps.most_ns, one.gaps.largest_ns)
    return [f"{one.share:.1%}", *(f"{gap / 1e6:.1f}" for gap in gaps)]


def _amount_rows(found: Amounts) -> list[list[str]]:
    rows = [
        [
            one.id,
            f"{one.needed_bytes / MIB:.0f}",
            *(Spread.of(found.figures[one.id][tool]).text(MIB, 1) for tool in found.tools),
        ]
        for one in found.known
    ]
    return [*rows, ["errors", "", *(_errors(found, tool) for tool in found.tools)]]


def _errors(found: Amounts, tool: str) -> str:
    lowest, highest = errors(
        [
            (figure, one.needed_bytes)
            for one in found.known
            for figure in found.figures[one.id][tool]
        ]
    )
    return f"{lowest:+.1%} to {highest:+.1%}"
