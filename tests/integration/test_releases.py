"""Other releases of packages (--with, bisect): a package of our own in a folder of wheels, installed by pip."""

import json
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import leftovers
import local_index
import pytest
from on_terminals import talk
from typed import CommandLine
from typed import words as words_of

from weighin.units import MIB

pytestmark = pytest.mark.slow

MODEL = "tests_nets:build"
NETS = "import torch\ndef build():\n    return torch.nn.Linear(2048, 4096, bias=False)\n"  # 32 MiB
SIZE = 32 * MIB
STRATEGY = """
'''Load by a package of several releases.'''
import tinyloader

FORMATS = ("pt",)
PACKAGES = ("tinyloader",)

def load(job):
    model = job.build_model()
    with job.phase("read"):
        states = tinyloader.read(job.checkpoint)
    model.load_state_dict(states[0])
    return model
"""
BENCH = f"bench {MODEL} -s ./mine.py --isolation process --set uses=none"


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    for version, copies in {"1.0": 1, "1.1": 1, "2.0": 2, "2.1": 2}.items():
        local_index.of_copies(folder, version, copies)
    local_index.release(folder, "1.2", local_index.BROKEN)
    return folder


@pytest.fixture
def mine(
    command: CommandLine, index: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    """A command line in a folder with a model and a strategy, and pip with the local index alone."""
    (command.folder / "tests_nets.py").write_text(NETS)
    (command.folder / "mine.py").write_text(STRATEGY)
    for name, value in local_index.variables(index).items():
        monkeypatch.setenv(name, value)
    yield command
    making = command.cache / "environments"
    assert [one.name for one in making.glob(".making-*")] == []


def read_peaks(command: CommandLine, run: str) -> dict[str, int]:
    """Return the kernel's high-water mark of each ok cell above that before the load, by its release."""
    ok = [one for one in command.records(run) if one["outcome"] == "ok"]
    return {
        one["cell"]["releases"]: one["peaks"]["rss_bytes"] - one["baseline"]["rss_bytes"]
        for one in ok
    }


def test_releases_are_measured_side_by_side_and_a_broken_one_is_skipped(mine: CommandLine) -> None:
    choices = " ".join(f"--with tinyloader=={one}" for one in ("1.0", "2.0", "1.2", "9.9"))
    ended = mine.run(f"{BENCH} {choices} --out run", patience_s=300)
    assert ended.code == 4, ended.err
    assert "installed tinyloader==1.0: " in ended.err
    grown = read_peaks(mine, "run")
    assert set(grown) == {"tinyloader==1.0", "tinyloader==2.0"}
    # The model and one state dict, or two, beside the pages of libraries that a load touches first.
    assert 2 * SIZE <= grown["tinyloader==1.0"] < 2.5 * SIZE
    more = grown["tinyloader==2.0"] - grown["tinyloader==1.0"]
    assert more == pytest.approx(SIZE, abs=SIZE // 4)
    first, second, broken, missing = mine.records("run")
    assert first["environment"]["releases"] == {"tinyloader": "1.0"}
    assert second["environment"]["releases"] == {"tinyloader": "2.0"}
    assert broken["outcome"] == missing["outcome"] == "skipped"
    assert broken["message"] == (
        "cannot import tinyloader==1.2: ImportError: needs a library that is not here"
    )
    assert missing["message"] == (
        "cannot install tinyloader==9.9: No matching distribution found for tinyloader==9.9"
    )
    for folder in ("any", "any again"):  # the newest of several is asked for each time
        ended = mine.run(f"{BENCH} --with tinyloader==2.* --out '{folder}'")
        assert "installing tinyloader==2.*" in ended.err
    again = mine.run(f"{BENCH} --with tinyloader==2.0 --with pinned --out again")
    assert "installing" not in again.err
    assert [one["outcome"] for one in mine.records("again")] == ["ok", "skipped"]
    assert "mine needs tinyloader: pip install tinyloader" in again.out


def test_what_the_newest_release_takes_more_fails_a_gate(mine: CommandLine) -> None:
    index = mine.folder / "index"
    local_index.of_copies(index, "1.0", 1)
    chosen: Any = local_index.variables(index)
    assert mine.run(f"{BENCH} --with latest --out before", **chosen).code == 0
    local_index.of_copies(index, "3.0", 3)
    assert mine.run(f"{BENCH} --with latest --out after", **chosen).code == 0
    written = mine.run("check before --baseline base.json --update")
    assert written.code == 0, written.out
    judged = mine.run("check after --baseline base.json --tolerance anon=8MiB")
    assert judged.code == 1
    assert "with=latest" in judged.out
    assert "releases.tinyloader: 1.0 -> 3.0" in judged.out
    assert "read" in judged.out
    compared = mine.run("compare before after --by tinyloader")
    assert "tinyloader 1.0" in compared.out
    assert "tinyloader 3.0" in compared.out


def test_a_bisection_finds_the_release_and_leaves_out_what_cannot_be_measured(
    mine: CommandLine,
) -> None:
    exact = "--metric peak_rss --tolerance 5% --isolation process"
    asked = f"bisect {MODEL} -s ./mine.py --package tinyloader --from 1.0 {exact}"
    ended = mine.run(f"{asked} --out found --json found.json", patience_s=300)
    assert ended.code == 0, ended.err
    found = json.loads((mine.folder / "found.json").read_text())
    assert (found["before"], found["first"]) == ("1.1", "2.0")
    assert "tinyloader 2.0 is the first with more peak_rss: " in ended.out
    assert "left out tinyloader 1.2: skipped: cannot import tinyloader==1.2" in ended.err
    assert {one.name for one in (mine.folder / "found").iterdir()} == {
        "1.0",
        "1.1",
        "1.2",
        "2.0",
        "2.1",
    }
    again = mine.run(f"{asked} --to 1.1 --out again")
    assert "No release of tinyloader up to 1.1 takes more peak_rss than 1.0" in again.out
    for words in ("--from 2.1", "--from one", "--from 1.0 --metric size"):
        assert mine.run(f"bisect --package tinyloader {words} -- true").code == 2


def test_a_command_finds_the_release_first(mine: CommandLine) -> None:
    (mine.folder / "say.py").write_text("import tinyloader, torch\nprint(tinyloader.COPIES)\n")
    ended = mine.run("run --with tinyloader==2.* --out run -- python say.py")
    assert (ended.code, ended.out) == (0, "2\n")
    assert re.match(
        r"installing tinyloader==2\.\*\ninstalled tinyloader==2\.\*: .* KiB in /.*\nweighin: ",
        ended.err,
    )
    twice = mine.run("run --with tinyloader==2.* --repeats 2 --out twice -- true")
    assert twice.err.count("installing") == 1
    refused = mine.run("run --with latest -- python say.py")
    assert refused.code == 2
    assert "name the package, without a release: --with transformers" in refused.err


def test_the_progress_of_an_installation_has_left_the_terminal_before_the_command(
    mine: CommandLine,
) -> None:
    asked = "run --with tinyloader==2.* --out run -- sh -c 'stty size; echo mine; sleep 1'"
    session = talk(mine, "env", "TERM=xterm", *words_of(asked))
    before, mine_alone, after = session.screen.partition("mine\n")
    assert (session.code, mine_alone, session.restored) == (0, "mine\n", True)
    assert "installing tinyloader==2.*" in before
    assert before.endswith("24 80\n")
    assert after.startswith("weighin: ")


def test_without_a_network_the_index_is_named(mine: CommandLine) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        variables: Any = {"PIP_INDEX_URL": index, "PIP_NO_INDEX": "", "PIP_FIND_LINKS": ""}
        ended = mine.run("run --with tinyloader==7.0 -- true", patience_s=200, **variables)
    assert ended.code == 4
    assert "Cannot install tinyloader==7.0: the package index cannot be reached" in ended.err


def test_ctrl_c_during_an_installation_leaves_nothing(mine: CommandLine) -> None:
    with socket.socket() as silent:  # it takes connections, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        variables: Any = {"PIP_INDEX_URL": index, "PIP_NO_INDEX": "", "PIP_FIND_LINKS": ""}
        before = {one.name for one in (mine.cache / "environments").glob("*")}
        started = mine.start(f"{BENCH} --with tinyloader==7.0 --out run", **variables)
        silent.settimeout(100)
        connection, _ = silent.accept()
        started.process.send_signal(signal.SIGINT)
        ended = started.end(patience_s=60)
        connection.close()
    assert ended.code == 130
    assert {one.name for one in (mine.cache / "environments").glob("*")} == before
    assert leftovers.processes(str(mine.cache)) == []


def test_two_runs_at_once_share_an_environment(mine: CommandLine) -> None:
    asked = "run --with tinyloader==1.1 --out"
    both = [mine.start(f"{asked} {name} --", "python", "-c", "import tinyloader") for name in "ab"]
    assert [one.end(patience_s=100).code for one in both] == [0, 0]
    listed = mine.run("cache list --json -")
    names = [one["name"] for one in json.loads(listed.out)["checkpoints"]]
    assert len([one for one in names if one.startswith("tinyloader==1.1-")]) == 1
    cleared = mine.run("cache clear tinyloader==1.1 --yes")
    assert "deleted 1 entry" in cleared.out
    assert not [*(mine.cache / "environments").glob("tinyloader==1.1-*")]


@pytest.mark.docker
def test_a_container_sees_the_release(mine: CommandLine) -> None:
    ended = mine.run(
        f"bench {MODEL} -s ./mine.py --isolation docker --set uses=none --with tinyloader==1.1 --out run"
    )
    assert ended.code == 0, ended.err
    assert [one["outcome"] for one in mine.records("run")] == ["ok"]
