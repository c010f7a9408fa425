"""One boot of the virtual machine, around a floor that was found on this one."""

import json
import os
from math import ceil, floor
from pathlib import Path

import machine as machines
import pytest
from typed import CommandLine

from weighin.checkpoint import cache
from weighin.suite.registry import model
from weighin.units import MIB


@pytest.fixture(scope="session")
def checkpoints(disk: Path) -> Path:
    """A cache with the checkpoints that the machine needs: made there, they would take minutes.

    ``mkfs.ext4`` keeps whole seconds of a file's time: the files get such times, and so do their markers.
    """
    folder = disk / "checkpoints"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHIN_CACHE", str(folder))
        for name in ("gpt2-tiny", "tied-tiny"):
            made = cache.ensure(model(name), "pt")
            seconds = int(made.path.stat().st_mtime)
            os.utime(made.path, (seconds, seconds))
            cache.write_marker(made.manifest_path.parent, made.format)
    return folder


@pytest.fixture(scope="session")
def floor_bytes(disk: Path, checkpoints: Path) -> int:
    """The floor on this machine; its model's checkpoint is in ``checkpoints`` then."""
    options = [word for name, value in machines.SEARCHED.items() for word in (f"--{name}", value)]
    line = CommandLine(disk, checkpoints)
    words = "floor --isolation cgroup --json - --out floor-here"
    ended = line.run(words, *options, patience_s=3600)
    if ended.code:
        pytest.fail(f"no floor was found on this machine:\n{ended.err}", pytrace=False)
    (search,) = json.loads(ended.out)["floors"]
    assert search["message"] == ""
    found: int = search["floor_bytes"]
    print(f"the floor of {machines.SEARCHED['strategies']} here is {found / MIB:g} MiB")
    return found


@pytest.fixture(scope="session")
def machine(
    request: pytest.FixtureRequest, disk: Path, checkpoints: Path, programs: Path
) -> machines.Ended:
    """What the virtual machine left, of the steps of the tests that are selected.

    In a nightly run, one is a bench 2 % and 16 MiB below the floor, and as far above it.
    """
    asked: dict[str, str] = {}
    steps: tuple[str, ...] = machines.STEPS
    if any(item.get_closest_marker("nightly") for item in request.session.items):
        steps = (*machines.NIGHTLY_STEPS, *steps)
        floor_bytes = request.getfixturevalue("floor_bytes")
        distance = 0.02 * floor_bytes + 16 * MIB
        below, above = ceil((floor_bytes - distance) / MIB), floor((floor_bytes + distance) / MIB)
        asked = {**machines.SEARCHED, "ram": f"{below}m,{above}m"}
    return machines.run(disk / "machine", checkpoints, programs, asked, steps)


@pytest.fixture(scope="session")
def engines(disk: Path, checkpoints: Path, programs: Path) -> machines.Ended:
    """The same of a machine that boots from a disk with engines of containers."""
    steps = ("kernel", *machines.ENGINES)
    packages = machines.ENGINE_PACKAGES
    return machines.run(disk / "engines", checkpoints, programs, {}, steps, packages)
