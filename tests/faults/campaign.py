"""Try a fault with a real command, judge what came of it, and count what it left behind."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import leftovers
import typed
from cells import isolation_missing
from faults import Fault
from typed import CommandLine

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
        base = typed.words("bench gpt2-tiny --isolation process -s streaming --out base")
        environment = self._environment(self.folder)
        subprocess.run(base, cwd=self.folder, env=environment, capture_output=True, check=True)

    def _environment(self, folder: Path) -> dict[str, str]:
        own = {"WEIGHIN_LOCK": str(folder / "lock"), "TMPDIR": str(folder / "tmp")}
        return CommandLine(folder, self.cache).environment | own

    def tried(self, fault: Fault) -> Tried:
        """Prepare the fault in a folder of its own, run its command, and judge what came of it."""
        folder = self.folder / re.sub(r"\W+", "-", fault.name)
        (folder / "tmp").mkdir(parents=True)
        shutil.copytree(self.folder / "base", folder / "base")
        cached, there, pids = _digests(self.cache), _there(), set[int]()
        try:
            fault.prepare(folder)
            code, text = self._run(fault, folder, fault.command, pids)
            wrong = [] if re.fullmatch(fault.code, str(code)) else [f"exit code {code}"]
            if not re.search(fault.says, text):
                wrong.append(f"does not say {fault.says!r}")
            if then := fault.then(folder) if callable(fault.then) else fault.then:
                again, more = self._run(fault, folder, then, pids, meets=False)
                text += more
                wrong += [f"the second command ends with {again}"] if again else []
            records, damaged = _records(folder / RUN)
            wrong += damaged + _misjudged(fault, records)
            wrong += [f"{name} is there" for name in fault.absent if (folder / name).exists()]
            wrong += [f"no {name}" for name in fault.present if not (folder / name).exists()]
            left = [f"process {command[:80]}" for _, command in _pids(str(folder))]
            left += [one for one in _there() - there if _is_of(one, pids, fault, folder)]
            made = {one.name for one in (folder / "tmp").iterdir()}
            left += [f"file {name}" for name in made if not name.startswith(TORCHS_OWN)]
            of_records = {one["samples_path"] for one in records}
            samples = {f"samples/{one.name}" for one in (folder / RUN / "samples").glob("*")}
            left += [f"file {one} of no record" for one in samples - of_records if records]
            if changed := _changed(fault, cached, _digests(self.cache)):
                left += [f"changed in the cache: {', '.join(changed[:3])}"]
            said = [": ".join(filter(None, (one["outcome"], one["message"]))) for one in records]
            came = f"{code}; {said[0] if said else _last_error(text)}"
            lost = sum(name not in {_name(one) for one in records} for name in fault.outcomes)
            traceback = "Traceback (most recent call last)" in text
            return Tried(fault, came, tuple(wrong), lost, tuple(left), traceback)
        finally:
            for pid, _ in _pids(str(folder)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for one in sorted(_there() - there, reverse=True):  # groups below come first
                if one.startswith("cgroup ") and _is_of(one, pids, fault, folder):
                    with suppress(OSError):
                        Path(one.removeprefix("cgroup ")).rmdir()
            if _digests(self.cache) != cached:  # the next fault must not suffer from this one
                shutil.rmtree(self.cache, ignore_errors=True)
                shutil.rmtree(self.folder / "base")
                self.start()
            shutil.rmtree(folder, ignore_errors=True)

    def _run(
        self, fault: Fault, folder: Path, command: Sequence[str], pids: set[int], meets: bool = True
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
        before = fault.before if meets else ()
        line = [one.replace("HERE", str(folder)) for one in (*before, *typed.words("", *command))]
        out, err = folder / "stdout", folder / "stderr"
        with out.open("wb") as to_out, err.open("wb") as to_err:
            process = subprocess.Popen(
                line, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=to_out,
                stderr=to_err, start_new_session=True, text=True,
            )  # fmt: skip
            pids.add(process.pid)
            if meets and fault.stop is not None:
                typed.Started(process, str(folder)).wait_for_handlers()
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


def _changed(fault: Fault, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the files of the cache that are others, but those that the command may make or make again."""

    def may(name: str) -> bool:
        allowed = fault.remakes if name in before else fault.makes
        return name == "plans.sha256" or bool(name in now and re.fullmatch(allowed, name))

    others = (name for name in {**now, **before} if now.get(name) != before.get(name))
    return sorted(name for name in others if not may(name))


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
    return {
        str(path.relative_to(cache)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in cache.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def _there() -> set[str]:
    """Return the cgroups and containers of all runs on this machine, and the mounts."""
    found = {f"cgroup {one}" for one in leftovers.all_groups()}
    found |= {f"mount {one}" for one in Path("/proc/self/mounts").read_text().splitlines()}
    if leftovers.has_docker():
        form = '--format=container weighin.{{.Label "weighin.owner"}} {{.ID}}'
        asked = ["docker", "ps", "--all", "--filter=label=weighin.owner", form]
        found |= {*subprocess.check_output(asked, text=True).splitlines()}
    return found


def _is_of(left: str, pids: set[int], fault: Fault, folder: Path) -> bool:
    """Tell whether a command of this fault made a cgroup, a container or a mount.

    Other runs of this machine make some, too.
    """
    if left.startswith("mount "):
        return str(folder) in left
    owner = re.search(r"weighin\.(\d+)", left)
    if owner is None:
        return False
    is_orphan = "--fork" in fault.before and not Path("/proc", owner[1]).exists()
    return int(owner[1]) in pids or is_orphan


def _pids(mark: str) -> list[tuple[int, str]]:
    """Return the processes whose environment or command line contains ``mark``."""
    found = (one.partition(" ") for one in leftovers.processes(mark, also_named=True))
    return [(int(pid), command) for pid, _, command in found]


_lacks = cache(isolation_missing)


def missing(fault: Fault) -> str:
    """Return what this machine lacks for a fault; empty if it can be tried."""
    if fault.needs == "root":
        return "" if os.geteuid() == 0 else "needs root"
    return _lacks(fault.needs) if fault.needs else ""
