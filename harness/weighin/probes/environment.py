"""Read this machine's properties that affect measurements, for records and ``weighin doctor``."""

import hashlib
import mmap
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import psutil

from weighin import __version__
from weighin.child_process import CODE_PATH
from weighin.probes.cgroup import memory_hierarchy, mounts, text_of
from weighin.result import USUAL_PAGE_BYTES
from weighin.text import masked
from weighin.units import KIB

_SYSFS: Final = Path("/sys")
_OWN_FILTER: Final = re.compile(r"(?m)^(local|worktree)\tfilter\..*\.(clean|process)$")
# Prefixes of the environment variables that affect allocators, threads or devices.
_SETTINGS: Final = (
    "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "PYTHONMALLOC", "PYTHONDEVMODE", "PYTHONOPTIMIZE",
    "PYTORCH_", "TORCH_", "OMP_", "MKL_", "OPENBLAS_NUM_THREADS", "CUDA_", "NVIDIA_",
)  # fmt: skip


def settings() -> dict[str, str]:
    return {
        name: "***" if re.search("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", name) else masked(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS)
    }


def machine() -> dict[str, Any]:
    hierarchy = memory_hierarchy()
    cpu = re.search(r"^model name\s*: (.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    pages = text_of(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        "machine": platform.machine(),
        "cpu": cpu[1] if cpu else platform.processor() or None,
        "cpus": os.cpu_count(),
        "ram_bytes": total_ram_bytes(),
        "swap_bytes": psutil.swap_memory().total,
        "kernel": platform.release(),
        "cgroup_version": hierarchy[0] if hierarchy else None,
        # The file has the chosen word in brackets: "always [madvise] never".
        "thp": pages.partition("[")[2].partition("]")[0] if pages else None,
        "governor": text_of(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) or None,
        "psi": Path("/proc/pressure/memory").exists(),
        "settings": settings(),
    } | ({} if mmap.PAGESIZE == USUAL_PAGE_BYTES else {"page_bytes": mmap.PAGESIZE})


def file_system_of(path: Path) -> str:
    """Return the type of the file system of ``path``, or of its nearest folder that exists."""
    place = _nearest(path).resolve()
    above = [one for one in mounts() if place.is_relative_to(one.place)]
    above.sort(key=lambda one: len(one.place.parts))  # the last mount at a folder hides the others
    return above[-1].kind if above else "unknown"


def read_ahead_bytes(path: Path) -> int:
    """Return how many bytes the kernel reads ahead on a page fault in a file at or below ``path``."""
    device = _nearest(path).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    block = f"dev/block/{number}"
    # A partition has its disk's setting in the folder above.
    for folder in (f"class/bdi/{number}", f"{block}/queue", f"{block}/../queue"):
        if text := text_of(_SYSFS / folder / "read_ahead_kb"):
            return int(text) * KIB
    return 128 * KIB  # the default of Linux


def _nearest(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def code() -> dict[str, Any]:
    """Return weighin's version, and the git commit of the current folder."""
    commit, is_changed = _git("rev-parse", "--verify", "HEAD"), None
    names = _git("config", "--show-scope", "--name-only", "--list") if commit else None
    if names is not None and not _OWN_FILTER.search(names):  # of which git would run the program
        # Without submodules, because a submodule's own configuration could start programs.
        status = _git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
        is_changed = None if status is None else bool(status)
    return {"weighin": __version__, "git_commit": commit, "git_dirty": is_changed}


def code_digest(*own: Path) -> str:
    """Return a hash of weighin's code and strategies, and of the files ``own``."""
    package, strategies = Path(__file__).resolve().parents[1], Path(CODE_PATH[1], "strategies")
    files = {str(path.relative_to(package)): path for path in package.rglob("*.py")}
    files |= {path.name: path for path in (*strategies.rglob("*.py"), *own)}
    whole = hashlib.sha256()
    for name, path in sorted(files.items()):
        whole.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


def free_ram_bytes() -> int:
    return int(psutil.virtual_memory().available)


def total_ram_bytes() -> int:
    return int(psutil.virtual_memory().total)


def _git(*arguments: str) -> str | None:
    """Run git, but no program of the current folder; return git's output, or None if git fails."""
    try:
        ended = subprocess.run(
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments],
            env=os.environ | {"GIT_ALLOW_PROTOCOL": ""},  # git must not fetch missing objects
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5.0,  # git is slow on a network disk, and must not delay a run
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None
