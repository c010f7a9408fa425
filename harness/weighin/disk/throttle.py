"""Limit the rate of a cgroup's reads from one disk, with the kernel's throttle.

The throttle delays only requests to the disk. It does not delay reads from the page cache. weighin
therefore drops the files from the page cache first.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from weighin.errors import IsolationUnavailable
from weighin.probes import mounts
from weighin.probes.storage import describe

_DISKS: Final = Path("/sys/class/block")
_V1_FILE: Final = "blkio.throttle.read_bps_device"
_V2_FILE: Final = "io.max"
_CONTROLLERS: Final = "cgroup.controllers"


def hierarchy() -> tuple[int, Path] | None:
    """Return (version, mount point) of the cgroup hierarchy that can limit reads; None if none can."""
    version2: Path | None = None
    for one in mounts.read():
        if one.kind == "cgroup" and "blkio" in one.options and (one.place / _V1_FILE).exists():
            return 1, one.place
        if one.kind == "cgroup2" and "io" in (one.place / _CONTROLLERS).read_text().split():
            version2 = version2 or one.place
    return (2, version2) if version2 else None


def device_of(path: Path) -> tuple[str, str]:
    """Return (name of the disk of ``path`` in /dev, ""), or ("", why ``path`` has no disk)."""
    storage = describe(path)
    if storage.device:
        return storage.device, ""
    return "", f"{path} lies on {storage.file_system}, which has no disk of its own"


def limit(groups: Sequence[Path], device: str, bytes_per_s: int) -> None:
    """Limit the rate at which the processes of one measurement read from the disk ``device``.

    ``groups`` has the measurement's cgroup in each cgroup hierarchy, one of which can limit reads.

    Raises:
        IsolationUnavailable: the kernel does not accept the limit.
    """
    number = (_DISKS / device / "dev").read_text().strip()
    v1 = [group for group in groups if (group / _V1_FILE).exists()]
    v2 = [group for group in groups if (group / _CONTROLLERS).exists()]
    try:
        if v1:
            (v1[0] / _V1_FILE).write_text(f"{number} {bytes_per_s}")
            return
        for group in v2[:1]:
            control = group.parent / "cgroup.subtree_control"
            if "io" not in control.read_text().split():
                control.write_text("+io")
            (group / _V2_FILE).write_text(f"{number} rbps={bytes_per_s}")
    except OSError as error:
        raise IsolationUnavailable(
            f"the kernel does not limit reads from /dev/{device}: {error.strerror}",
            "leave out --disk, or use a machine with the cgroup controller blkio (v1) or io (v2)",
        ) from None
