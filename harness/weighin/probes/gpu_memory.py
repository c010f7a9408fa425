"""Sample one process's GPU memory as the driver counts it, with NVML from another process.

It includes the memory that no allocator of the process counts: the CUDA context, code and the
libraries' own buffers.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, Final

_LIBRARY: Final = "libnvidia-ml.so.1"
_INTERVAL_S: Final = 0.02  # one query takes about a millisecond
_TOO_SMALL: Final = 7  # NVML_ERROR_INSUFFICIENT_SIZE: more processes than the array has room for
_UNKNOWN: Final = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
_MOST_PROCESSES: Final = 1024


class NvmlUnavailable(Exception):
    """NVML cannot report the memory; the message is the reason."""


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, as nvmlDeviceGetComputeRunningProcesses_v3 fills it."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class DriverMemory:
    """Samples one process on one GPU, in a thread, until ``stop`` is called.

    Raises:
        NvmlUnavailable: no NVML, no such GPU, or NVML does not report memory per process.
    """

    def __init__(self, uuid: str | None, pid: int | None) -> None:
        if uuid is None:
            raise NvmlUnavailable("this torch does not report the GPU's UUID")
        if pid is None:
            raise NvmlUnavailable("the worker is not a process of this machine")
        self._pid = pid
        self._points: list[tuple[int, int]] = []
        self._stop = threading.Event()
        self._library = _load()
        self._device = ctypes.c_void_p()
        try:
            self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))
            self.driver_version = self._read_driver_version()
            self._points.append((time.monotonic_ns(), self._used_bytes()))
        except NvmlUnavailable:
            self._library.nvmlShutdown()
            raise
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._thread.start()

    def stop(self) -> list[tuple[int, int]]:
        """End the sampling and return the samples: (monotonic ns, bytes)."""
        self._stop.set()
        self._thread.join()
        self._library.nvmlShutdown()
        return self._points

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            now = time.monotonic_ns()
            try:
                self._points.append((now, self._used_bytes()))
            except NvmlUnavailable:  # the process has ended
                return

    def _used_bytes(self) -> int:
        count = ctypes.c_uint(64)
        while True:
            processes = (_Process * count.value)()
            status = self._function("nvmlDeviceGetComputeRunningProcesses_v3")(
                self._device, ctypes.byref(count), processes
            )
            if status != _TOO_SMALL or count.value > _MOST_PROCESSES:
                break
            count.value *= 2
        self._check("nvmlDeviceGetComputeRunningProcesses_v3", status)
        for process in processes[: count.value]:
            if process.pid == self._pid:
                if process.used_bytes == _UNKNOWN:
                    raise NvmlUnavailable("NVML does not report memory per process here")
                return int(process.used_bytes)
        raise NvmlUnavailable(f"NVML lists no process {self._pid}: another PID namespace, or MIG")

    def _read_driver_version(self) -> str:
        text = ctypes.create_string_buffer(80)
        self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        return text.value.decode(errors="replace")

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, self._function(name)(*arguments))

    def _function(self, name: str) -> Callable[..., int]:
        try:
            function: Callable[..., int] = getattr(self._library, name)
        except AttributeError:
            raise NvmlUnavailable(f"this driver's NVML has no {name}") from None
        return function

    def _check(self, name: str, status: int) -> None:
        if status:
            self._library.nvmlErrorString.restype = ctypes.c_char_p
            message = self._library.nvmlErrorString(status) or b"?"
            raise NvmlUnavailable(f"NVML: {name}: {message.decode(errors='replace')}")


def _load() -> Any:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NvmlUnavailable(f"no NVML: {error}") from None
    if status := library.nvmlInit_v2():
        raise NvmlUnavailable(f"NVML does not start: error {status}")
    return library
