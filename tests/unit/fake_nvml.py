"""NVML's binary interface over a few processes that a test names."""

import ctypes
from typing import Any

from weighin.probes import gpu_memory

_TOO_SMALL = 7
_POINTER = ctypes.c_void_p


class Nvml:
    """A library that knows one GPU, and its processes as (pid, bytes)."""

    def __init__(self, processes: list[tuple[int, int]]) -> None:
        self.processes = processes
        self.running = 0
        self.status = 0
        self.uuids: list[bytes] = []
        by_uuid = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, _POINTER)
        version = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_uint)
        listing = ctypes.CFUNCTYPE(
            ctypes.c_int,
            _POINTER,
            ctypes.POINTER(ctypes.c_uint),
            ctypes.POINTER(gpu_memory._Process),
        )
        self.nvmlDeviceGetHandleByUUID = by_uuid(self._find)
        self.nvmlSystemGetDriverVersion = version(self._version)
        self.nvmlDeviceGetComputeRunningProcesses_v3 = listing(self._list)
        self.nvmlErrorString = lambda status: b"Not Found"

    def nvmlInit_v2(self) -> int:  # noqa: N802 (as NVML calls it)
        self.running += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.running -= 1
        return 0

    def _find(self, uuid: bytes, device: int) -> int:
        self.uuids.append(uuid)
        return self.status

    def _version(self, text: int, length: int) -> int:
        ctypes.memmove(text, b"580.1\0", 6)
        return 0

    def _list(self, device: int, count: Any, places: Any) -> int:
        room, count[0] = count[0], len(self.processes)
        if room < len(self.processes):
            return _TOO_SMALL
        for place, (pid, used) in enumerate(self.processes):
            places[place].pid, places[place].used_bytes = pid, used
        return 0
