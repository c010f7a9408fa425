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

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import known_commands

from weighin.isolation.cgroup import limit as limit_group
from weighin.isolation.cgroup import temporary_group
from weighin.probes import page_cache
from weighin.show.table import Table
from weighin.units import MIB, format_bytes

Command = Sequence[str]
CHECKPOINT_MIB: Final = 256
LIMIT_BYTES: Final = 600 * MIB
LOAD: Final = """
import sys
import torch

model = torch.nn.Linear(8192, 8192, bias=False)
state = torch.load(sys.argv[1])
model.load_state_dict(state)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One command. ``needed_bytes`` is its known answer; None for a program that nobody has counted."""

    name: str
    command: tuple[str, ...]
    needed_bytes: int | None = None
    cold: Path | None = None
    is_python: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """What a tool said: the peak, and for a killed command its exit code and its words."""

    peak_bytes: int | None
    code: int = 0
    words: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--peers", type=Path, default=Path("/usr/bin"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path, help="a page with the line <!-- benchmarks/running_commands.py -->")  # fmt: skip
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weighin-commands-", dir="/var/tmp") as name:
        folder = Path(name)
        cases = _cases(folder)
        tools = {name: tool for name, tool in _tools(asked.peers, folder).items() if tool}
        lines = [
            *_peaks(cases, tools),
            "",
            *_kills(cases, tools),
            "",
            *_times(folder, asked.rounds),
        ]
    text = "\n".join(lines)
    print(text)
    if asked.write:
        page = asked.write.read_text()
        block = re.compile(
            r"(<!-- benchmarks/running_commands.py -->\n).*?(<!-- end -->)", re.DOTALL
        )
        asked.write.write_text(block.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page))


def _cases(folder: Path) -> list[Case]:
    programs = known_commands.build(_made(folder / "programs"))
    file = folder / "file"
    file.write_bytes(os.urandom(MIB) * (known_commands.FILE_BYTES // MIB))
    checkpoint = folder / "weights.pt"
    make = f"import torch; torch.save({{'weight': torch.rand(8192, 8192)}}, {str(checkpoint)!r})"
    subprocess.run([sys.executable, "-c", make], check=True)
    (folder / "load.py").write_text(LOAD)
    known = {
        one.id: Case(one.id.replace(known_commands.FILE, "FILE"), one.command(programs, file), one.needed_bytes)
        for one in known_commands.KNOWN
        if one.name in ("spend", "forks", "child", "shares", "reads")
        and one.id not in ("spend 256 5", "spend 256 20")  # as "spend 256 1"
    }  # fmt: skip
    load = (sys.executable, str(folder / "load.py"), str(checkpoint))
    child = next(one for one in known if one.startswith("child"))
    pipeline = f"cat {shlex.quote(str(file))} | {shlex.join(known[child].command)} | wc -c"
    return [
        *known.values(),
        Case(
            f"sh -c 'cat FILE | {child} | wc -c'", ("sh", "-c", pipeline), known[child].needed_bytes
        ),
        Case("load.py, file cached", load, is_python=True),
        Case("load.py, file not cached", load, cold=checkpoint, is_python=True),
    ]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _tools(peers: Path, folder: Path) -> dict[str, Callable[[Command, int | None], Said] | None]:
    """Return a function for each tool, which runs a command under a limit, in bytes, or without one."""

    def if_there(name: str, tool: Callable[[Command, int | None], Said]) -> Callable[[Command, int | None], Said] | None:  # fmt: skip
        return tool if (peers / name).exists() or Path(name).exists() else None

    def weighin(command: Command, limit: int | None) -> Said:
        out = folder / f"run-{time.monotonic_ns()}"
        limits = ("--ram", str(limit)) if limit else ()
        ended = _run([sys.executable, "-P", "-m", "weighin", "run", "--isolation", "cgroup", "--out", str(out), *limits, "--", *command])  # fmt: skip
        record = json.loads((out / "records.jsonl").read_text())
        words = _last(ended.stderr, 4).partition(" weighin: ")[
            0
        ]  # the kill; its explanation is left out
        return Said(record["ran"]["needed_bytes"], ended.returncode, words)

    def gnu_time(command: Command, limit: int | None) -> Said:
        ended = _run(["/usr/bin/time", "-v", *command], limit)
        size = re.search(r"Maximum resident set size \(kbytes\): (\d+)", ended.stderr)
        words = [line.strip() for line in ended.stderr.splitlines() if "signal" in line]
        return Said(int(size[1]) * 1024 if size else None, ended.returncode, " ".join(words))

    def runexec(command: Command, limit: int | None) -> Said:
        limits = (f"--memlimit={limit}B",) if limit else ()
        ended = _run([str(peers / "runexec"), "--no-container", "--output", "/dev/null", *limits, "--", *command])  # fmt: skip
        size = re.search(r"^memory=(\d+)B", ended.stdout, re.MULTILINE)
        words = [line for line in ended.stdout.splitlines() if line.startswith(("terminationreason", "exitsignal", "returnvalue"))]  # fmt: skip
        return Said(int(size[1]) if size else None, ended.returncode, " ".join(words))

    def mprof(command: Command, limit: int | None) -> Said:
        data = folder / "mprof.dat"
        data.unlink(missing_ok=True)
        ended = _run([str(peers / "mprof"), "run", "-C", "-o", str(data), *command], limit)
        sizes = [float(line.split()[1]) for line in data.read_text().splitlines() if line.startswith("MEM")]  # fmt: skip
        return Said(round(max(sizes, default=0) * MIB), ended.returncode, _last(ended.stderr, 1))

    def psrecord(command: Command, limit: int | None) -> Said:
        log = folder / "psrecord.txt"
        line = shlex.join(command)
        ended = _run(
            [str(peers / "psrecord"), line, "--include-children", "--log", str(log)], limit
        )
        rows = [row.split() for row in log.read_text().splitlines()[1:]]
        sizes = [float(row[2]) for row in rows if len(row) > 2]
        return Said(round(max(sizes, default=0) * MIB), ended.returncode, _last(ended.stdout, 1))

    def memray(command: Command, limit: int | None) -> Said:
        if command[0] != sys.executable:
            return Said(None)
        out = folder / f"memray-{time.monotonic_ns()}.bin"
        packages = str(
            Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")
        )
        python = [str(peers / "python"), "-m", "memray", "run", "-q", "-f", "-o", str(out)]
        ended = _run([*python, *command[1:]], limit, PYTHONPATH=packages)
        stats = _run([str(peers / "memray"), "stats", str(out)]).stdout
        size = re.search(r"Peak memory usage:\s*([\d.]+)\s*(\w?B)", stats)
        unit = {"KB": 1000, "MB": 1000**2, "GB": 1000**3}
        return Said(round(float(size[1]) * unit[size[2]]) if size else None, ended.returncode, _last(ended.stderr, 1))  # fmt: skip

    return {
        "weighin run": weighin,
        "/usr/bin/time -v": if_there("/usr/bin/time", gnu_time),
        "runexec": if_there("runexec", runexec),
        "mprof -C": if_there("mprof", mprof),
        "psrecord": if_there("psrecord", psrecord),
        "memray": if_there("memray", memray),
    }


def _run(
    command: Command, limit: int | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a tool with its command to its end, in a cgroup with this limit if there is one."""
    run = partial(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | variables,
    )
    if limit is None:
        return run()
    with temporary_group() as group:
        limit_group(group, limit)
        return run(preexec_fn=lambda: (group / "cgroup.procs").write_text("0"))


def _last(text: str, number: int) -> str:
    return " ".join(line.strip() for line in text.strip().splitlines()[-number:])


def _peaks(cases: Sequence[Case], tools: dict[str, Callable[[Command, int | None], Said]]) -> list[str]:  # fmt: skip
    rows = []
    for case in cases:
        sizes = []
        for tool in tools.values():
            if case.cold:
                page_cache.drop([case.cold])
            sizes.append(_mib(tool(case.command, None).peak_bytes))
        rows.append([f"{case.name}", _mib(case.needed_bytes), *sizes])
    about = f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"
    return [
        f"Peaks in MiB ({about}). *Known* is the anonymous and shared memory that the program takes;"
        " `spend 256 1` takes 256 MiB of it for 1 ms.",
        "",
        Table.of(("command", "known", *tools), rows, names=1).markdown(),
    ]


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}"


def _kills(cases: Sequence[Case], tools: dict[str, Callable[[Command, int | None], Said]]) -> list[str]:  # fmt: skip
    load = next(case for case in cases if case.is_python)
    lines = [f"`load.py` under a limit of {format_bytes(LIMIT_BYTES)}, which kills it:", ""]
    for name, tool in tools.items():
        said = tool(load.command, LIMIT_BYTES)
        lines.append(f"* **{name}**: exit code {said.code}, {_mib(said.peak_bytes)} MiB; {said.words or 'no word of it'}")  # fmt: skip
    return lines


def _times(folder: Path, rounds: int) -> list[str]:
    """Return the wall time that weighin adds, as medians of the differences and ratios of each round."""
    (folder / "work.py").write_text("import torch\nfor _ in range(40): torch.rand(900, 900) @ torch.rand(900, 900)\n")  # fmt: skip
    commands = {
        "true": ("true",),
        "import torch, then multiply": (sys.executable, str(folder / "work.py")),
    }
    rows = []
    for name, command in commands.items():
        for option in ("--no-stacks", "--stacks"):
            pairs = []
            for _ in range(rounds):
                alone_s = _seconds(("sh", "-c", shlex.join(command)))
                run = (sys.executable, "-P", "-m", "weighin", "run", option, "--isolation", "cgroup", "--out", str(folder / f"t{time.monotonic_ns()}"), "--")  # fmt: skip
                pairs.append((alone_s, _seconds((*run, *command))))
            more = median(under - alone for alone, under in pairs)
            ratio = median(under / alone for alone, under in pairs)
            rows.append([f"{name}", f"{option}", f"{median(a for a, _ in pairs):.3f} s", f"{more:+.3f} s", f"{ratio:.2f}x"])  # fmt: skip
    return [
        f"The wall time that weighin adds, medians of {rounds} rounds, each beside the command alone:",
        "",
        Table.of(
            ("command", "option", "alone", "more under weighin", "ratio"), rows, names=2
        ).markdown(),
    ]


def _seconds(command: Command) -> float:
    start_s = time.monotonic()
    subprocess.run(command, capture_output=True, check=True)
    return time.monotonic() - start_s


if __name__ == "__main__":
    main()
