"""Skip tests whose requirements are missing, with the same reason that a user would see.

``--require docker,cgroup`` turns such a skip into a failure, for machines that must have an engine.
"""

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import known_commands
import pytest
import seldom
from filelock import FileLock
from fork_server import ForkServer
from hypothesis import settings
from snapshots import Compare, kept

# A shell lets what it starts with "&" ignore SIGINT and SIGQUIT, and nohup SIGHUP; children inherit
# that. They do not inherit a handler, so tests' children take these signals as from a terminal.
for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(each) is signal.SIG_IGN:
        signal.signal(each, lambda *_: None)

# A tmpfs, as /tmp often is, keeps its files in the page cache, from which tests drop them.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/var/tmp")

# Each process of a test run has a lock of its own, because tests measure nothing that another run
# could disturb. A process of xdist inherits the lock of the process that started it.
if "WEIGHIN_LOCK" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["WEIGHIN_LOCK"] = f"weighin-test-{os.getpid()}"

# An environment in which someone installed torchvision may have a build that does not fit torch.
# transformers would import it, and no test needs it but those of the zoo, which have their own.
try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    sys.modules["torchvision"] = None  # type: ignore[assignment]

# The files that take longest, which start first so that no process of xdist ends long after the others.
LONGEST = (
    "test_documented_runs.py", "test_zoo.py", "test_own_models.py", "test_commands.py", "test_fleet.py",
    "test_foreign_repository.py", "test_checkpoints.py",
)  # fmt: skip

_UNCHANGED = "WEIGHIN_TESTS_UNCHANGED"

_OF_OTHERS = (
    *("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"),
    *("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"),
)

# A busy machine must not fail a test, nor a checkout in which this user may not write.
_KEPT = {} if os.access(Path(__file__).parents[1], os.W_OK) else {"database": None}
settings.register_profile("untimed", deadline=None, **_KEPT)
settings.register_profile("ci", deadline=None, print_blob=True, **_KEPT)  # how to repeat a failure
settings.load_profile("ci" if "CI" in os.environ else "untimed")


def _of_cells(function: str, *arguments: str) -> Callable[[], str]:
    """Return a question to cells.py, which imports torch: some tests must not need it."""
    return lambda: str(getattr(import_module("cells"), function)(*arguments))


def _unless(is_there: Callable[[], object], reason: str) -> Callable[[], str]:
    return lambda: "" if is_there() else reason


def _has_compiler() -> bool:
    here = shutil.which("gcc") and Path("/usr/include/stdio.h").exists()
    return bool(known_commands.BUILT or here)


def _reaches_index() -> bool:
    """Ask for the newest pip, as briefly as pip can."""
    asked = "-m pip index versions pip --timeout=5 --retries=0"
    command = [sys.executable, *asked.split()]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _vm_missing() -> str:
    programs = {"qemu-system-x86_64": "qemu-system-x86", "debootstrap": "debootstrap", "mkfs.ext4": "e2fsprogs"}  # fmt: skip
    packages = [package for program, package in programs.items() if not shutil.which(program)]
    if packages:
        install = f"apt-get install --no-install-recommends {' '.join(packages)}"
        return f"programs for the virtual machine are missing: {install}"
    if os.geteuid() != 0:
        return "debootstrap needs root to make the virtual machine's disk: sudo make test-vm"
    if sys.version_info[:2] != (3, 11):
        again = "make clean; make test-vm PYTHON=python3.11"
        return f"the virtual machine has Python 3.11 and uses this environment's packages: {again}"
    return ""


def _fresh_missing() -> str:
    if not shutil.which("debootstrap"):
        return "debootstrap is missing: apt-get install debootstrap"
    return "" if os.geteuid() == 0 else "debootstrap needs root: sudo make test-fresh"


_MISSING: dict[str, Callable[[], str]] = {
    "docker": cache(_of_cells("isolation_missing", "docker")),
    "cgroup": cache(_of_cells("isolation_missing", "cgroup")),
    "cuda": cache(_of_cells("cuda_missing")),
    "fuse": cache(_of_cells("fuse_missing")),
    "browser": _unless(lambda: shutil.which("chromium"), "no chromium here: apt-get install --no-install-recommends chromium"),
    "compiler": _unless(_has_compiler, "no C compiler here: apt-get install --no-install-recommends gcc libc6-dev"),
    "vm": _vm_missing,
    "fresh": _fresh_missing,
    "ray": _unless(lambda: find_spec("ray"), "ray is not installed: pip install ray"),
    "index": cache(_unless(_reaches_index, "pip reaches no index: see pip config list")),
    "root": _unless(lambda: os.geteuid() == 0, "only root can become another user, or mount a disk: sudo make test"),
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write the texts of tests/contract again"
    )
    parser.addoption(
        "--shuffle", metavar="SEED", help="run the files, and the tests of each, in a random order"
    )
    parser.addoption(
        "--require",
        default="",
        metavar="MARKERS",
        help=f"fail instead of skip if one of these is missing: {','.join(_MISSING)}",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "loadfile":  # not by number, which says little of the time
        config.option.loadscopereorder = False
    if "PYTEST_XDIST_WORKER" not in os.environ:  # all processes must choose the same tests
        os.environ[_UNCHANGED] = " ".join(seldom.unchanged())
    for name in _required(config):
        if name not in _MISSING:
            raise pytest.UsageError(f"--require {name}: known are {', '.join(_MISSING)}")


def pytest_report_header() -> str:
    parts = os.environ[_UNCHANGED].split()
    return f"not by day, unchanged since {seldom.base()[:9]}: {', '.join(parts)}" if parts else ""


def _leave_to_the_night(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of parts that have not changed, unless they are asked for; at night, of all parts."""
    marks = config.getoption("markexpr")
    at_night = "nightly" in marks and "not nightly" not in marks
    named = {Path(one.partition("::")[0]).resolve() for one in config.args}
    unchanged = os.environ[_UNCHANGED].split()
    for item in items:
        part = seldom.part_of(item.path, getattr(item, "originalname", ""))
        is_asked_for = bool(named & {item.path, item.path.parent})
        if part and (at_night or (part in unchanged and not is_asked_for)):
            item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has not changed; put the longest files first; or shuffle all files, and their tests."""
    _leave_to_the_night(config, items)
    ranks: dict[str, float] = {name: number for number, name in enumerate(LONGEST)}
    if seed := config.getoption("--shuffle"):
        draw = random.Random(seed)
        draw.shuffle(items)
        ranks = {item.path.name: draw.random() for item in items}
    items.sort(key=lambda item: ranks.get(item.path.name, len(LONGEST)))


def _use_one_thread() -> None:
    """Let torch use one thread in each of several test processes, which have the processors together.

    With more threads than processors, threads of OpenMP wait for each other in loops: the tests of
    conformance took nearly twice the processor time. Processes that tests start are not affected.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare Docker and cgroups before the first test, because this removes leftovers of dead runs.

    Later it would also remove leftovers that tests in another process of xdist make on purpose.
    """
    if session.config.option.collectonly:
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        _use_one_thread()
    lock = Path(tempfile.gettempdir()) / f"weighin-test-preparing-{os.getuid()}.lock"
    with FileLock(lock):  # one process makes the empty image, the others use it
        for marker in ("docker", "cgroup"):
            if any(item.get_closest_marker(marker) for item in session.items):
                _MISSING[marker]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in _MISSING.items():
        if item.get_closest_marker(marker) and (reason := missing()):
            if marker in _required(item.config):
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)


def pytest_runtest_logfinish() -> None:
    """Free what the traceback of a test that failed holds open, lest a later test fail of it."""
    if hasattr(sys, "last_value"):
        for name in ("last_exc", "last_value", "last_traceback"):  # the first since Python 3.12
            vars(sys).pop(name, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.fixture(scope="session", autouse=True)
def _usual_variables() -> Iterator[None]:
    """Leave out what a terminal and a runner of CI set, which commands would follow."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _OF_OTHERS:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: an empty one, with the cache of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def same(request: pytest.FixtureRequest) -> Compare:
    """Call it to compare a text with its snapshot beside the test: ``same("verbs/list.txt", output)``."""
    folder = request.path.with_name("snapshots")
    return kept(folder, request.config.getoption("--rewrite"))


@pytest.fixture(scope="session")
def disk() -> Iterator[Path]:
    """Return a folder on a disk; /tmp may be a tmpfs, whose pages cannot be evicted."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weighin-test-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def programs(disk: Path) -> Path:
    """The folder of the C programs that take known amounts of memory, built once."""
    if known_commands.BUILT:
        return Path(known_commands.BUILT)
    folder = disk / "programs"
    folder.mkdir()
    return known_commands.build(folder)


@pytest.fixture(scope="session")
def known_file(disk: Path) -> Path:
    """The file that some of these programs read."""
    (path := disk / "known-file").write_bytes(os.urandom(known_commands.FILE_BYTES))
    return path


@pytest.fixture(scope="session")
def torch_fork_server() -> Iterator[ForkServer]:
    """Runs code in interpreters that have imported torch."""
    with closing(ForkServer("import torch")) as server:
        yield server


def _required(config: pytest.Config) -> list[str]:
    return [name for name in config.getoption("--require").split(",") if name]
