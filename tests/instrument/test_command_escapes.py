"""A command that gets out of its cgroup or its limit is told, and passes no gate."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cells import MIB, cgroup_root, cgroup_version, new_group
from typed import ROOT, CommandLine, Measured, measured

pytestmark = [pytest.mark.cgroup, pytest.mark.compiler, pytest.mark.root]

OWN = "own=$(sed -n 's/.*:memory://p' /proc/self/cgroup); "
"""Shell code that sets ``own`` to the path of the shell's memory cgroup (v1)."""
VERSION1 = pytest.mark.skipif(cgroup_version() != 1, reason="writes the files of cgroup v1")


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A cgroup that is not the command's."""
    with new_group() as group:
        yield group.path


def assert_escaped(run: Path, *command: str, limit: str = "100m") -> Measured:
    """Measure a command that gets out: the run ends with an error, and passes no gate."""
    found = measured(run, command, f"--isolation cgroup --ram {limit}")
    print(found.record["message"], found.said)
    assert found.record["outcome"] == "measurement_failed"
    gate = CommandLine(run.parent, run.parent / "cache").run(
        f"check {run.name} --budget 'anon <= 10 GiB'"
    )
    assert found.code and gate.code
    return found


@pytest.mark.parametrize("how", ["stays", "child"])
@pytest.mark.parametrize("limit", ["none", "64m"])
def test_a_process_that_leaves_the_cgroup(
    how: str, limit: str, programs: Path, elsewhere: Path, tmp_path: Path
) -> None:
    command = (str(programs / "leaves"), str(elsewhere), "100", how)
    found = assert_escaped(tmp_path / "run", *command, limit=limit)
    assert "left the command's cgroup for" in found.said
    assert "ended well" not in found.said
    assert found.record["ran"]["needed_is_sampled"]


@VERSION1
def test_a_process_that_leaves_the_cgroup_and_returns(
    programs: Path, elsewhere: Path, tmp_path: Path
) -> None:
    leaves = f"exec {programs}/leaves {elsewhere} 200 returns 400 {cgroup_root()}$own"
    assert_escaped(tmp_path / "run", "/bin/sh", "-c", OWN + leaves)


@VERSION1
def test_a_command_that_raises_its_limit(programs: Path, tmp_path: Path) -> None:
    files = "memory.memsw.limit_in_bytes memory.limit_in_bytes"
    raises = f"for file in {files}; do echo -1 > {cgroup_root()}$own/$file; done; sleep 1"
    spends = f"; exec {programs}/spend 200 200"
    found = assert_escaped(tmp_path / "run", "/bin/sh", "-c", OWN + raises + spends)
    # The limit itself is read now and then; else the exact peak tells it at the end.
    told = ("the command changed the limit of its cgroup", "the limit was changed")
    assert any(words in found.record["message"] for words in told)


@VERSION1
@pytest.mark.parametrize("isolation", ["cgroup", "process"])
def test_the_limit_of_a_cgroup_below_is_not_one_around(
    isolation: str, programs: Path, tmp_path: Path
) -> None:
    mount = cgroup_root()
    script = (
        f"{OWN}inner={mount}$own/inner-$$; mkdir $inner; echo 50M > $inner/memory.limit_in_bytes;"
        f" (echo 0 > $inner/cgroup.procs; sleep 1; exec {programs}/spend 100 100);"
        " code=$?; rmdir $inner; exit $code"
    )
    found = measured(tmp_path / "run", ("/bin/sh", "-c", script), f"--isolation {isolation}")
    print(found.said)
    (kill,) = found.record["ran"]["kills"]
    assert kill["limit_is"] == "below"
    assert "below its own" in found.said
    assert "around" not in found.said
    assert "outer" not in found.record["message"]


@VERSION1
def test_the_limit_of_a_cgroup_beside_is_not_one_around(
    programs: Path, elsewhere: Path, tmp_path: Path
) -> None:
    (elsewhere / "memory.limit_in_bytes").write_text(str(50 * MIB))
    command = (str(programs / "leaves"), str(elsewhere), "100", "late")
    found = measured(tmp_path / "run", command)
    print(found.said, found.record["message"])
    (kill,) = found.record["ran"]["kills"]
    assert kill["limit_is"] == "elsewhere"
    assert "outside its own" in found.record["message"]
    assert "around" not in found.said


LEAVING = """
import mmap
from pathlib import Path
from strategies.baseline import load as load_rightly


def load(job):
    with job.phase("away"):
        own = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
               if ":memory:" in line][0]
        Path("{elsewhere}/cgroup.procs").write_text("0")
        held = mmap.mmap(-1, 200 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for offset in range(0, 200 << 20, 4096):
            held[offset] = 1
        {free}
        Path("{mount}" + own + "/cgroup.procs").write_text("0")
    return load_rightly(job)
"""


@VERSION1
@pytest.mark.slow
@pytest.mark.parametrize("free", ["pass", "held.close()"])
def test_a_load_that_leaves_fills_and_returns(free: str, elsewhere: Path, tmp_path: Path) -> None:
    mount = cgroup_root()
    code = LEAVING.replace("{elsewhere}", str(elsewhere)).replace("{mount}", str(mount))
    (tmp_path / "leaving.py").write_text(code.replace("{free}", free))
    command = CommandLine(tmp_path, Path(os.environ["WEIGHIN_CACHE"]))
    ended = command.run("bench gpt2-tiny -s ./leaving.py --isolation cgroup --out run")
    record = command.record("run")
    print(str(record)[:600], ended.err)
    assert record["outcome"] == "strategy_failed"
    assert "left its cgroup" in record["message"]
    assert ended.code


def test_weighin_may_run_in_weighin(programs: Path, tmp_path: Path) -> None:
    """The inner weighin's command is in a cgroup that may be outside the outer one's."""
    variables = (f"PYTHONPATH={ROOT / 'harness'}", f"WEIGHIN_LOCK={tmp_path / 'lock'}")
    inner = (sys.executable, "-P", "-m", "weighin", "run", "--no-stacks", "--ram", "50m")
    options = ("--isolation", "cgroup", "--out", str(tmp_path / "in"))
    command = (str(programs / "spend"), "100", "100")
    found = measured(
        tmp_path / "run", ("/usr/bin/env", *variables, *inner, *options, "--", *command)
    )
    print(found.said)
    assert "around it" not in found.said
