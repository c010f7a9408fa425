"""A virtual machine with Debian's own kernel and cgroup v2 alone: its disks, and what ran in it.

qemu emulates it in software, so that it runs wherever qemu does: no /dev/kvm, no network. It boots
from a disk that is made once and kept, and is never written to; a second disk brings the working
tree and checkpoints in, and what was found out.
"""

import compileall
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest
from filelock import FileLock

from weighin.checkpoint import temporary_folders
from weighin.probes import environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

STEPS = ("kernel", "instrument", "killed", "floor", "outer-limit")
"""What the script ``inside`` does, in its order."""
NIGHTLY_STEPS = ("ordinary-user", "loads", "amounts", "namespaces", "doctor")
"""What it does also in a nightly run: a load imports torch, which takes half a minute there."""
ENGINES = ("docker", "docker-userns", "docker-rootless", "podman")
"""Engines of containers on cgroup v2, in a machine of their own: a nightly run's."""
ENGINE_PACKAGES = (
    *("docker.io", "podman", "uidmap", "slirp4netns", "rootlesskit", "fuse-overlayfs"),
    *("dbus-user-session", "apparmor", "iproute2", "iptables", "kmod", "procps"),
)

SEARCHED = {
    "model": "weighin.models.gpt2:gpt2",
    "kwargs": '{"vocab_size": 16384, "emb_dim": 768, "n_layers": 2, "n_heads": 12}',
    "strategies": "streaming",
}
"""Whose floor is looked at, as options of ``weighin floor`` and ``bench``."""

KERNEL_SUITE = os.environ.get("WEIGHIN_VM_KERNEL") or "bookworm"
"""The suite of Debian from which the kernel is: Linux 6.1, or 6.12 of ``bookworm-backports``."""

_TREE = ("harness", "strategies", "configs", "tests", "pyproject.toml")
_RAM_MIB = 4096
_PATIENCE_S = 60 * 60
_UNUSED_S = 7 * 24 * 3600  # after which a disk in the cache is taken to be of an older version


@dataclass(frozen=True, slots=True)
class Ended:
    """What a machine left: for each step ``NAME.out``, ``.err`` and ``.status``, and runs."""

    folder: Path
    console: str

    def status(self, step: str) -> int | None:
        """Return the exit status of a step; None where it did not come to its end."""
        path = self.folder / f"{step}.status"
        return int(path.read_text()) if path.exists() else None

    @property
    def resets_peaks(self) -> bool:
        """Whether its kernel resets the peak of a cgroup: Linux 6.12 and newer."""
        version = self.out("kernel").split()[2].split(".")
        return (int(version[0]), int(version[1])) >= (6, 12)

    def out(self, step: str) -> str:
        return (self.folder / f"{step}.out").read_text()


def run(
    folder: Path,
    checkpoints: Path,
    programs: Path,
    asked: Mapping[str, str],
    steps: Sequence[str],
    packages: Sequence[str] = (),
) -> Ended:
    """Boot the machine, have it do ``steps``, and return what it left; fail if it does not end by itself.

    ``folder`` is new, and on a disk; ``checkpoints`` is a cache that the machine begins with;
    ``programs`` are those of ``known_commands``, since the machine has no compiler; ``asked`` are
    the options of its bench; ``packages`` are Debian's, on a disk of their own.
    """
    folder.mkdir()
    boot_from = _disk(packages)
    work = folder / "work.ext4"
    texts = {**asked, "steps": "".join(f"{step}\n" for step in steps)}
    _make_work_disk(work, folder / "work", texts, {"cache": checkpoints, "programs": programs})
    console = folder / "console.txt"
    start = time.monotonic()
    try:
        _boot(boot_from, work, console)
    except subprocess.TimeoutExpired:
        _fail(f"{_text(console)}\nthe machine still ran after {_PATIENCE_S} s")
    print(f"the virtual machine ran for {time.monotonic() - start:.0f} s")
    _run("debugfs", "-R", f"rdump /out {folder}", str(work))
    ended = Ended(folder / "out", _text(console))
    if ended.status(steps[-1]) is None:
        _fail(f"{ended.console}\nthe machine ended before its last step did")
    return ended


def _fail(text: str) -> NoReturn:
    pytest.fail(text, pytrace=False)  # the text says all


def _disk(packages: Sequence[str]) -> Path:
    """Return the folder with the disk, kernel and initrd to boot from; make them where they are not."""
    shelf = temporary_folders.folder() / "vm"
    shelf.mkdir(parents=True, exist_ok=True)
    folder = shelf / _digest(packages)
    with FileLock(shelf / "lock"):
        if not folder.exists():
            for old in shelf.iterdir():  # what nothing boots from, and what a killed build left
                if old.is_dir() and time.time() - old.stat().st_mtime > _UNUSED_S:
                    shutil.rmtree(old)
            start = time.monotonic()
            with tempfile.TemporaryDirectory(dir=shelf) as making:
                (new := Path(making) / "disk").mkdir()
                purelib = sysconfig.get_path("purelib")
                _run(str(HERE / "make-disk"), str(new), purelib, KERNEL_SUITE, *packages)
                new.rename(folder)
            print(f"its disk took {time.monotonic() - start:.0f} s to make")
        os.utime(folder)
    return folder


def _digest(packages: Sequence[str]) -> str:
    parts = [KERNEL_SUITE, *packages]
    parts += [(HERE / name).read_text() for name in ("make-disk", "weighin.service")]
    parts += sorted(f"{one.name}=={one.version}" for one in metadata.distributions())
    return sha256("\n".join(parts).encode()).hexdigest()[:16]


def _make_work_disk(
    image: Path, content: Path, texts: Mapping[str, str], given: Mapping[str, Path]
) -> None:
    (content / "out").mkdir(parents=True)
    for name, value in texts.items():
        (content / "out" / name).write_text(value)
    for name in _TREE:
        source, target = ROOT / name, content / "tree" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    # The machine would need ten times as long for it, and an ordinary user there at every start.
    compileall.compile_dir(content / "tree" / "harness", quiet=2)
    for name, source in given.items():
        shutil.copytree(source, content / name, copy_function=os.link)
    (content / "bin").mkdir()
    shutil.copy2(Path(sysconfig.get_path("scripts")) / "py-spy", content / "bin")
    room = "assume_storage_prezeroed=1"
    _run("mkfs.ext4", "-q", "-L", "work", "-E", room, "-d", str(content), str(image), "4G")
    shutil.rmtree(content)


def _boot(boot_from: Path, work: Path, console: Path) -> None:
    """Run the machine until it powers off; whatever happens here, nothing of it is left running."""
    line = "root=LABEL=root ro console=ttyS0 psi=1 panic=-1 loglevel=4 systemd.unit=weighin.service"
    line += " systemd.show_status=error mitigations=off"  # there is nobody to be kept from anything
    # qemu 7.2 emulates cmpxchg16b wrongly, by which Linux 6.12 ended in a double fault; numpy asks for it.
    line += " clearcpuid=cx16"
    if huge_pages := environment.machine()["thp"]:  # floors differ by it
        line += f" transparent_hugepage={huge_pages}"
    command = ["setpriv", "--pdeathsig", "KILL"]  # where this process itself is killed
    command += ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max"]
    command += ["-smp", "2", "-m", str(_RAM_MIB), "-nodefaults", "-no-reboot", "-display", "none"]
    command += ["-kernel", str(boot_from / "vmlinuz"), "-initrd", str(boot_from / "initrd.img")]
    command += ["-append", line, "-serial", f"file:{_escaped(console)}"]
    for image, how in ((boot_from / "root.ext4", "snapshot=on"), (work, "cache=unsafe")):
        command += ["-drive", f"file={_escaped(image)},format=raw,if=virtio,{how}"]
    variables = os.environ | {"TMPDIR": str(console.parent)}  # what is written to the first disk
    null = subprocess.DEVNULL
    # In the background of a terminal it would be stopped, but for a session of its own.
    with subprocess.Popen(
        command, stdin=null, stdout=null, env=variables, start_new_session=True
    ) as process:
        try:
            process.wait(_PATIENCE_S)
        finally:
            process.kill()


def _escaped(path: Path) -> str:
    return str(path).replace(",", ",,")


def _run(*command: str) -> None:
    """Run a program; fail with the end of what it said where it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = "\n".join((ended.stdout + ended.stderr).splitlines()[-30:])
        _fail(f"{said}\n{command[0]} ended with status {ended.returncode}")


def _text(console: Path) -> str:
    return console.read_text(errors="replace") if console.exists() else ""
