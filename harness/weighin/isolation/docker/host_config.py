"""The settings with which containers are made: RAM limit, mounts and rights."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import docker
from docker.types import DeviceRequest, LogConfig, Mount

from weighin.cell import Cell
from weighin.isolation.docker.mounts import CODE, Bind
from weighin.probes import environment
from weighin.units import MIB

_TMPFS_BYTES: Final = 64 * MIB  # for each of /tmp and /dev/shm; Docker's default for /dev/shm
_PIDS: Final = 4096  # includes threads; torch starts at least one per processor
# The image sets the variables for NVIDIA's hook, and lacks the file that LD_PRELOAD names here.
_NOT_PASSED: Final = ("NVIDIA_", "LD_PRELOAD")


def of_worker(
    client: docker.APIClient,
    info: Mapping[str, Any],
    binds: Sequence[Bind],
    cell: Cell,
) -> dict[str, Any]:
    """Return the settings of a worker's container: no network, no capabilities, a read-only root."""
    return client.create_host_config(
        **_limits_and_mounts(info, binds, cell),
        network_mode="none",
        ipc_mode="private",
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        pids_limit=_PIDS,
        shm_size=_TMPFS_BYTES,
        tmpfs={"/tmp": f"size={_TMPFS_BYTES},mode=1777"},  # noqa: S108 (inside the container)
        device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])]
        if cell.needs_gpu
        else None,
    )


def of_command(
    client: docker.APIClient,
    info: Mapping[str, Any],
    binds: Sequence[Bind],
    cell: Cell,
) -> dict[str, Any]:
    """Return the settings of a command's container: Docker's defaults, ``binds`` and the limits."""
    return client.create_host_config(**_limits_and_mounts(info, binds, cell))


def _limits_and_mounts(
    info: Mapping[str, Any], binds: Sequence[Bind], cell: Cell
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "log_config": LogConfig(type="none"),
        "mounts": [
            Mount(bind.target, str(bind.source), "bind", read_only=not bind.writable)
            for bind in binds
        ],
    }
    if cell.ram_limit_bytes is not None:
        settings["mem_limit"] = settings["memswap_limit"] = cell.ram_limit_bytes  # equal: no swap
        if info.get("CgroupVersion", "1") == "1":  # cgroup v2 has no swappiness
            settings["mem_swappiness"] = 0
    return settings


def user(info: Mapping[str, Any]) -> str | None:
    """Return this user's uid:gid; None for a rootless engine, whose root is this user."""
    options = info.get("SecurityOptions") or []
    if any("name=rootless" in option for option in options):
        return None
    return f"{os.getuid()}:{os.getgid()}"


def worker_environment(of_cell: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment variables.

    These are the cell's, this process's that affect measurements, and weighin's own.
    """
    passed = {
        name: value
        for name, value in environment.settings().items()
        if not name.startswith(_NOT_PASSED)
    }
    ours = {"PYTHONPATH": CODE, "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"}  # noqa: S108
    return passed | dict(of_cell) | ours
