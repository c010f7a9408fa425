"""The module pynvml over a few processes that a test names."""

from types import SimpleNamespace


class Nvml:
    """What ``import pynvml`` gives: one GPU, and its processes as (pid, bytes)."""

    class NVMLError(Exception):
        """As pynvml's own."""

    def __init__(self, processes: list[tuple[int, int | None]], *, cannot_start: str = "") -> None:
        self._cannot_start = cannot_start
        self.processes = processes
        self.running = 0
        self.uuids: list[str] = []
        self.failure = ""

    def nvmlInit(self) -> None:  # noqa: N802 (as NVML calls it)
        if self._cannot_start:
            raise self.NVMLError(self._cannot_start)
        self.running += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.running -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:  # noqa: N802
        self.uuids.append(uuid)
        if self.failure:
            raise self.NVMLError(self.failure)
        return self

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlDeviceGetComputeRunningProcesses(self, device: object) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]
