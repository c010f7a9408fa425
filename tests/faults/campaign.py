"""Try a fault with a real command, judge what came of it, and count what it left behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import leftovers
from cells import isolation_missing
from faults import Fault

ROOT: Final = Path(__file__).parents[2]
RUN: Final = "run"
TORCHS_OWN: Final = "torchinductor_"
"""The beginning of the name of a temporary folder that torch makes, and keeps."""
HANGS: Final = 124
"""Stands for the exit code of a command that does not end."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a fault: ``wrong`` says why it is not what must come; empty if it is."""

    fault: Fault
    came: str
    wrong: tuple[str, ...] = ()
    lost: int = 0
    left: tuple[str, ...] = ()
    traceback: bool = False

    @property
    def right(self) -> bool:
        return not (self.wrong or self.lost or self.left or self.traceback)


@dataclass(frozen=True, slots=True)
class Campaign:
    """The place of a campaign: a cache with the checkpoint of a small model, and a run with a record."""

    folder: Path

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def start(self) -> None:
        """Make the checkpoint and the run that faults begin with."""
        self._weighin(
            self.folder,
            *("bench", "gpt2-tiny", "--isolation", "process", "-s", "streaming", "--out", "base"),
        )

    def _weighin(self, folder: Path, *arguments: str, **changes: Any) -> None:
        subprocess.run(
            [sys.executable, "-P", "-m", "weighin", *arguments],
            cwd=folder,
            env=self._environment(folder) | changes,
            capture_output=True,
            text=True,
            check=True,
        )

    def _environment(self, folder: Path) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(ROOT / "harness"),
            "WEIGHIN_CACHE": str(self.cache),
            "WEIGHIN_LOCK": str(folder / "lock"),
            "TMPDIR": str(folder / "tmp"),
            "COLUMNS": "100",
            "NO_COLOR": "1",
        }

    def tried(self, fault: Fault) -> Tried:
        """Prepare the fault in a folder of its own, run its command, and judge what came of it."""
        folder = self.folder / re.sub(r"\W+", "-", fault.name)
        (folder / "tmp").mkdir(parents=True)
        shutil.copytree(self.folder / "base", folder / "base")
        cached, mounts = _digests(self.cache), _mounts()
        groups, containers, pids = _groups(), _containers(), set[int]()
        try:
            fault.prepare(folder)
            code, text = self._run(fault, folder, fault.command, pids)
            wrong = [] if re.fullmatch(fault.code, str(code)) else [f"exit code {code}"]
            if fault.says and not re.search(fault.says, text):
                wrong.append(f"does not say {fault.says!r}")
            if fault.then:
                again, more = self._run(fault, folder, fault.then, pids, meets=False)
                text += more
                wrong += [f"the second command ends with {again}"] if again else []
            records, damaged = _records(folder / RUN)
            wrong += damaged + _misjudged(fault, records)
            wrong += [f"{name} is there" for name in fault.absent if (folder / name).exists()]
            left = [
                *_processes(str(folder)),
                *(f"cgroup {one}" for one in _groups() - groups if _is_of(one, pids, fault)),
                *(
                    f"container {one}"
                    for one in _containers() - containers
                    if _is_of(one, pids, fault)
                ),
                *(f"mount {one}" for one in _mounts() - mounts if str(folder) in one),
                *(
                    f"file {one.name}"
                    for one in (folder / "tmp").glob("*")
                    if not one.name.startswith(TORCHS_OWN)
                ),
            ]
            now = _digests(self.cache)
            changed = [
                name
                for name in sorted(now | cached)
                if now.get(name) != cached.get(name)
                and not (
                    name in now
                    and re.fullmatch(fault.remakes if name in cached else fault.makes, name)
                )
                and name != "plans.sha256"  # digests of plans, which stay
            ]
            if changed:
                left += [f"changed in the cache: {', '.join(changed[:3])}"]
            came = f"{code}; " + "; ".join(
                f"{one['outcome']}: {one['message']}" if one["message"] else one["outcome"]
                for one in records[:1]
            )
            if not records:
                came = f"{code}; {_last_error(text)}"
            return Tried(
                fault,
                came,
                tuple(wrong),
                sum(name not in {_name(one) for one in records} for name in fault.outcomes),
                tuple(left),
                "Traceback (most recent call last)" in text,
            )
        finally:
            _end(str(folder))
            for group in sorted(_groups() - groups, reverse=True):  # those below come first
                if _is_of(group, pids, fault):
                    with suppress(OSError):
                        Path(group).rmdir()
            if _digests(self.cache) != cached:  # the next fault must not suffer from this one
                shutil.rmtree(self.cache, ignore_errors=True)
                shutil.rmtree(self.folder / "base")
                self.start()
            shutil.rmtree(folder, ignore_errors=True)

    def _run(
        self,
        fault: Fault,
        folder: Path,
        command: tuple[str, ...],
        pids: set[int],
        *,
        meets: bool = True,
    ) -> tuple[int, str]:
        """Run a command to its end, and return its exit code and its text; ``meets`` the fault, or not.

        ``pids`` gets the number of its process.
        """
        environment = self._environment(folder)
        if meets:
            for name, value in fault.variables.items():
                environment.pop(name, None)
                if value is not None:
                    environment[name] = value.replace("HERE", str(folder))
        before = tuple(one.replace("HERE", str(folder)) for one in fault.before) if meets else ()
        words = tuple(one.replace("HERE", str(folder)) for one in command)
        out, err = folder / "stdout", folder / "stderr"
        with out.open("wb") as to_out, err.open("wb") as to_err:
            process = subprocess.Popen(
                [*before, sys.executable, "-P", "-m", "weighin", *words],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
                start_new_session=True,
            )
            pids.add(process.pid)
            if meets and fault.stop is not None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(fault.stop_s)
                process.send_signal(fault.stop)
            try:
                code = process.wait(fault.patience_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return HANGS, f"still running after {fault.patience_s} s"
        return code, err.read_bytes().decode(errors="replace")


def _misjudged(fault: Fault, records: list[dict[str, Any]]) -> list[str]:
    """Return how the records differ from the outcomes that must come."""
    by_name = {_name(one): one for one in records}
    wrong = []
    cells = Counter(json.dumps(one["cell"], sort_keys=True) for one in records)
    wrong += ["a cell has two records"] if len(cells) < len(records) else []
    for name, (outcome, message) in fault.outcomes.items():
        if (found := by_name.get(name)) is None:
            continue  # counted as lost
        if not re.fullmatch(outcome, found["outcome"]):
            wrong.append(f"{name} is {found['outcome']}: {str(found['message'])[:200]}")
        said = [found["message"] or "", *found.get("warnings", ())]
        if not any(re.search(message, text) for text in said):
            wrong.append(f"{name} does not say {message!r}: {str(said)[:200]}")
    return wrong


def _name(record: Mapping[str, Any]) -> str:
    return str(record["cell"]["strategy"])


def _records(run: Path) -> tuple[list[dict[str, Any]], list[str]]:
    path = run / "records.jsonl"
    if not path.is_file():
        return [], []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()], []
    except ValueError as error:
        return [], [f"a record is no JSON: {error}"]


def _last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1][:200]


def _digests(cache: Path) -> dict[str, str]:
    """Return a digest of each file of the cache's checkpoints."""
    return {
        str(path.relative_to(cache)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in cache.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def _groups() -> set[str]:
    """Return the cgroups of all runs on this machine, and those below them."""
    return {*map(str, leftovers.all_groups())}


def _is_of(group: str, pids: set[int], fault: Fault) -> bool:
    """Tell whether a command of this fault made a cgroup or a container.

    Other runs of this machine make some, too.
    """
    owner = re.search(r"weighin\.(\d+)", group)
    if owner is None:
        return False
    return int(owner[1]) in pids or (
        "--fork" in fault.before and not Path("/proc", owner[1]).exists()
    )


def _containers() -> set[str]:
    if not leftovers.has_docker():
        return set()
    form = 'weighin.{{.Label "weighin.owner"}} {{.ID}}'
    asked = subprocess.run(
        ["docker", "ps", "--all", "--filter=label=weighin.owner", f"--format={form}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(asked.stdout.splitlines())


def _mounts() -> set[str]:
    return set(Path("/proc/self/mounts").read_text().splitlines())


def _pids(mark: str) -> list[tuple[int, str]]:
    """Return the processes whose environment or command line contains ``mark``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if mark.encode() in command + (folder / "environ").read_bytes():
                found.append(
                    (int(folder.name), command.replace(b"\0", b" ").decode("utf-8", "replace"))
                )
    return found


def _processes(mark: str) -> list[str]:
    return [f"process {command[:80]}" for _, command in _pids(mark)]


def _end(mark: str) -> None:
    for pid, _ in _pids(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


_lacks = cache(isolation_missing)


def missing(fault: Fault) -> str:
    """Return what this machine lacks for a fault; empty if it can be tried."""
    if fault.needs == "root":
        return "" if os.geteuid() == 0 else "needs root"
    return _lacks(fault.needs) if fault.needs else ""
