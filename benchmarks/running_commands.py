"""Compare what ``weighin run`` and other tools say of commands whose memory is known.

C programs with a known answer (``tests/commands/programs``), a pipeline, a script that loads a
checkpoint run under each tool. The tools' peaks stand beside the known answer. The same
script then runs under a limit that kills it, and each tool's own words about the kill are kept. Last,
the wall time of commands under weighin is compared with the time of the same commands alone, in pairs.

The other tools come from the folder of an environment: ``--peers /tmp/peers/bin``, made with
``python3 -m venv /tmp/peers && /tmp/peers/bin/pip install benchexec memory_profiler psrecord memray``.
A tool that is missing has no column. ``--write docs/command.md`` replaces the page's tables.

It needs root, because runexec and weighin make cgroups, and a C compiler.
"""

import argparse
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import known_commands
import tools
from page_blocks import filled
from rounds import interleaved, ratios

from weighin.probes import page_cache
from weighin.show.table import Table
from weighin.units import MIB, format_bytes

BLOCK: Final = "benchmarks/running_commands.py"
LIMIT_BYTES: Final = 600 * MIB
LOAD: Final = """
import sys
import torch

model = torch.nn.Linear(8192, 8192, bias=False)
state = torch.load(sys.argv[1])
model.load_state_dict(state)
"""
WORK: Final = """
import torch
for _ in range(40): torch.rand(900, 900) @ torch.rand(900, 900)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One command. ``needed_bytes`` is its known answer; None for a program that nobody has counted."""

    name: str
    command: tuple[str, ...]
    needed_bytes: int | None = None
    cold: Path | None = None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peers", type=Path, default=Path("/usr/bin"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path, help=f"a page with the line <!-- {BLOCK} -->")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weighin-commands-", dir="/var/tmp") as name:
        folder = Path(name)
        cases = _cases(folder)
        others = tools.peers(asked.peers, folder)
        all_tools = {"weighin run": tools.weighin("cgroup", folder), **others}
        load = next(case for case in cases if case.name.startswith("load.py"))
        parts = [_peaks(cases, all_tools), _kills(load, all_tools), _times(folder, asked.rounds)]
    text = "\n\n".join(parts)
    print(text)
    if asked.write:
        asked.write.write_text(filled(asked.write.read_text(), {BLOCK: text}))


def _cases(folder: Path) -> list[Case]:
    (programs := folder / "programs").mkdir()
    known_commands.build(programs)
    file, checkpoint = folder / "file", folder / "weights.pt"
    file.write_bytes(os.urandom(MIB) * (known_commands.FILE_BYTES // MIB))
    make = f"import torch; torch.save({{'weight': torch.rand(8192, 8192)}}, {str(checkpoint)!r})"
    subprocess.run([sys.executable, "-c", make], check=True)
    (folder / "load.py").write_text(LOAD)
    known = {
        one.id: Case(one.id, one.command(programs, file), one.needed_bytes)
        for one in known_commands.KNOWN
        if one.name in ("spend", "forks", "child", "shares", "reads")
        and one.id not in ("spend 256 5", "spend 256 20")  # as "spend 256 1"
    }
    load = (sys.executable, str(folder / "load.py"), str(checkpoint))
    child = next(one for one in known if one.startswith("child"))
    pipeline = f"cat {shlex.quote(str(file))} | {shlex.join(known[child].command)} | wc -c"
    piped = ("sh", "-c", pipeline)
    return [
        *known.values(),
        Case(f"sh -c 'cat FILE | {child} | wc -c'", piped, known[child].needed_bytes),
        Case("load.py, file cached", load),
        Case("load.py, file not cached", load, cold=checkpoint),
    ]


def _peaks(cases: Sequence[Case], all_tools: Mapping[str, tools.Tool]) -> str:
    rows = []
    for case in cases:
        row = [case.name, _mib(case.needed_bytes)]
        for tool in all_tools.values():
            if case.cold:
                page_cache.drop([case.cold])
            row.append(_mib(tool(case.command, None).peak_bytes))
        rows.append(row)
    about = f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"
    return (
        f"Peaks in MiB ({about}). *Known* is the anonymous and shared memory that the program takes;"
        " `spend 256 1` takes 256 MiB of it for 1 ms.\n\n"
        + Table.of(("command", "known", *all_tools), rows).markdown()
    )


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}"


def _kills(load: Case, all_tools: Mapping[str, tools.Tool]) -> str:
    lines = [f"`load.py` under a limit of {format_bytes(LIMIT_BYTES)}, which kills it:", ""]
    for name, tool in all_tools.items():
        said = tool(load.command, LIMIT_BYTES)
        words = f"{_mib(said.peak_bytes)} MiB; {said.words or 'no word of it'}"
        lines.append(f"* **{name}**: exit code {said.code}, {words}")
    return "\n".join(lines)


def _times(folder: Path, rounds: int) -> str:
    """Return the wall time that weighin adds, as medians of the differences and ratios of each round."""
    (folder / "work.py").write_text(WORK)
    work = (sys.executable, str(folder / "work.py"))
    rows = []
    for name, command in {"true": ("true",), "import torch, then multiply": work}.items():
        for option in ("--no-stacks", "--stacks"):
            under = tools.weighin("cgroup", folder, option)
            alone = partial(subprocess.run, ("sh", "-c", shlex.join(command)), check=True)
            ways = {
                "alone": partial(_seconds, alone),
                "under": partial(_seconds, partial(under, command, None)),
            }
            times = interleaved(ways, rounds)
            more = (own - alone for alone, own in zip(*times.values(), strict=True))
            ratio = median(ratios(times["under"], times["alone"]))
            figures = f"{median(times['alone']):.3f} s", f"{median(more):+.3f} s", f"{ratio:.2f}x"
            rows.append([name, option, *figures])
    heads = ("command", "option", "alone", "more under weighin", "ratio")
    return (
        f"The wall time that weighin adds, medians of {rounds} rounds, each beside the command alone:\n\n"
        + Table.of(heads, rows, names=2).markdown()
    )


def _seconds(run: Callable[[], object]) -> float:
    start_s = time.monotonic()
    run()
    return time.monotonic() - start_s


if __name__ == "__main__":
    main()
