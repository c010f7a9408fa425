"""What of this machine changes a figure: recorded with every result, printed by ``weighin doctor``."""

import mmap
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Final

import psutil

from weighin import __version__
from weighin.probes.cgroup import memory_hierarchy
from weighin.record import USUAL_PAGE_BYTES
from weighin.units import KIB

_GIT_TIMEOUT_S = 5.0  # a work tree on a network disk must not hold a run up
_READ_AHEAD_BYTES: Final = 128 * KIB  # Linux' own, where a disk says nothing else

SETTINGS = ("MALLOC_", "PYTORCH_", "OMP_", "MKL_", "CUDA_", "NVIDIA_", "LD_PRELOAD", "TORCH_")
"""Environment variables that change allocators, threads or devices begin with one of these."""


def settings() -> dict[str, str]:
    """Return the environment variables that change what a worker allocates or how it runs."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}


def machine() -> dict[str, Any]:
    """Return what this machine is and how it is set, as far as it changes a figure."""
    hierarchy = memory_hierarchy()
    return {
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "swap_bytes": psutil.swap_memory().total,
        "kernel": platform.release(),
        "cgroup_version": hierarchy[0] if hierarchy else None,
        "thp": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "governor": _text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "psi": Path("/proc/pressure/memory").exists(),
        "settings": settings(),
        **_page_size(),
    }


def code() -> dict[str, Any]:
    """Return which code was measured: this weighin, and the commit of the folder it was started in.

    ``git_commit`` is None where the folder is in no git work tree, or git does not tell;
    ``git_dirty`` says whether tracked files differ from that commit.
    """
    commit = _git("rev-parse", "--verify", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "weighin": __version__,
        "git_commit": commit,
        "git_dirty": None if changed is None else bool(changed),
    }


def free_ram_bytes() -> int:
    """Return how much RAM can be used now without swapping, as the kernel estimates it."""
    return psutil.virtual_memory().available


def total_ram_bytes() -> int:
    return psutil.virtual_memory().total


def read_ahead_bytes(path: Path, sysfs: Path = Path("/sys")) -> int:
    """Return how much the kernel reads at once when a page of a mapped file is not in memory.

    That is a setting of the disk, or the network file system, that holds ``path`` or its nearest
    folder that exists.
    """
    nearest = next(one for one in (path, *path.absolute().parents) if one.exists())
    device = nearest.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    folders = "class/bdi", "dev/block", "dev/block"
    names = "read_ahead_kb", "queue/read_ahead_kb", "../queue/read_ahead_kb"  # .. of a partition
    for folder, name in zip(folders, names, strict=True):
        if told := _text(sysfs / folder / number / name):
            return int(told) * KIB
    return _READ_AHEAD_BYTES


def _page_size() -> dict[str, int]:
    """Return the size of a page where it is not that of a record which does not say it."""
    return {} if mmap.PAGESIZE == USUAL_PAGE_BYTES else {"page_bytes": mmap.PAGESIZE}


def _git(*arguments: str) -> str | None:
    try:
        ended = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _cpu_model() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # this kernel or this virtual machine does not have it
        return None


def _chosen(path: Path) -> str | None:
    """Return the word in brackets of a sysfs choice: "always [madvise] never" is "madvise"."""
    text = _text(path)
    return text.partition("[")[2].partition("]")[0] if text else None
