"""README's first two commands, as a new user types them: Debian 12, no root, no Docker, no cgroup to write to.

The only Python there is Debian's. The clone has the commit that is checked out here. pip's settings are
those of this machine. What the commands print is the transcript of the test (``-rP`` shows it).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pip_settings
import pytest

pytestmark = pytest.mark.fresh

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE_S = 60 * 60


@dataclass(frozen=True, slots=True)
class Machine:
    """A root folder with a clone in the user's home."""

    root: Path

    @property
    def clone(self) -> Path:
        return self.root / "home/ordinary/weighin"

    def type(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the clone as the ordinary user, and print what it prints."""
        settings = pip_settings.read()
        variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/home/ordinary", "USER": "ordinary",
            "PLACES": "\n".join(map(str, pip_settings.places(settings))),
        }  # fmt: skip
        proxies = {name: value for name, value in os.environ.items() if name.endswith("_proxy")}
        start = time.monotonic()
        done = subprocess.run(
            [HERE / "enter", self.root, f"cd weighin && {command}"],
            env=variables | settings | proxies, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        print(f"$ {command}\n{done.stdout}({time.monotonic() - start:.0f} s)\n")
        return done


@pytest.fixture(scope="module")
def machine(disk: Path) -> Machine:
    made = Machine(disk / "root")
    subprocess.run([HERE / "make-root", made.root], check=True)
    subprocess.run(["git", "clone", "--quiet", ROOT, made.clone], check=True)
    for path in (made.clone, *made.clone.rglob("*")):
        shutil.chown(path, 1000, 1000)
    return made


def make_commands() -> list[str]:
    """Return README's commands of make, in their order: those of its first block, then those in its text."""
    found = re.findall(
        r"^(make \w+) |`(make test)`", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    return [block or inline for block, inline in found]


def test_the_two_commands_pass(machine: Machine) -> None:
    assert machine.type("python3 -V; id -un").stdout == "Python 3.11.2\nordinary\n"
    assert machine.type("docker version || touch /sys/fs/cgroup/x").returncode != 0
    bench, test = make_commands()

    done = machine.type(bench)
    assert done.returncode == 0
    assert "installing what weighin's commands need into .venv" in done.stdout
    assert len(re.findall(r"^gpt2-small \w+ +no limit   ok ", done.stdout, re.MULTILINE)) == 6
    packages = machine.clone / ".venv/lib/python3.11/site-packages"
    assert (packages / "torch").is_dir()
    assert not (packages / "pytest").exists()

    done = machine.type(test)
    assert done.returncode == 0
    assert "installing what tests, checks and docs need into .venv" in done.stdout
    assert re.search(r"=+ \d+ passed, \d+ skipped in ", done.stdout)
