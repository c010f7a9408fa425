"""Find the file system and the disk of a path, for records and for simulated slow disks."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weighin.probes import mounts
from weighin.probes.environment import device_of, text_of
from weighin.probes.mounts import Mounted

_SYSFS: Final = Path("/sys")
_KINDS: Final = {
    "overlay": "overlay",
    "tmpfs": "tmpfs",
    "ramfs": "tmpfs",
    "nfs": "NFS",
    "nfs4": "NFS",
    "9p": "shared by the host",
    "virtiofs": "shared by the host",
    "cifs": "network",
    "smb3": "network",
    "ceph": "network",
    "lustre": "network",
}


@dataclass(frozen=True, slots=True)
class Storage:
    """The file system and the disk of a path, as a record has them.

    Attributes:
        file_system: the kernel's name of the file system's type, such as "ext4" or "fuse.sshfs".
        kind: "local", "overlay", "tmpfs", "NFS", "FUSE", "network" or "shared by the host".
        device: the name of the whole disk in /dev, such as "vda"; None without a disk.
        rotational: whether the kernel treats the disk as a hard disk; None without a disk.
    """

    file_system: str
    kind: str
    device: str | None = None
    rotational: bool | None = None


def describe(path: Path) -> Storage:
    """Return the storage of ``path``, or of its nearest parent folder that exists."""
    nearest, number = device_of(path)
    name = file_system_of(mounts.read(), nearest.resolve())
    device = disk_of(number) or None
    kind = "FUSE" if name.partition(".")[0] in ("fuse", "fuseblk") else _KINDS.get(name, "local")
    rotational = text_of(_SYSFS / "class/block" / device / "queue/rotational") if device else ""
    return Storage(name, kind, device, rotational == "1" if rotational else None)


def file_system_of(found: Iterable[Mounted], path: Path) -> str:
    """Return the file system's type for a ``path`` without symbolic links; "unknown" if none fits."""
    above = [one for one in found if path.is_relative_to(one.place)]
    above.sort(key=lambda one: len(one.place.parts))  # the last mount at a folder hides the others
    return above[-1].kind if above else "unknown"


def disk_of(number: str, sysfs: Path = _SYSFS) -> str:
    """Return the disk's name for the device number of a disk or of its partition; "" for others."""
    folder = sysfs / "dev/block" / number
    if not folder.exists():
        return ""
    resolved = folder.resolve()
    return resolved.parent.name if (resolved / "partition").exists() else resolved.name
