"""Take, hold and give back known amounts of memory, a phase each, and load rightly."""

import ctypes
import mmap
import sys
import time
from pathlib import Path

import torch

from strategies.baseline import load as load_rightly
from weighin import Load

MIB = 1024**2
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE

with_gil_released = ctypes.CDLL(None)
with_gil_held = ctypes.PyDLL(None)
for libc in (with_gil_released, with_gil_held):
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def load(job: Load) -> torch.nn.Module:
    model = load_rightly(job)
    with job.phase("take 512 MiB"):
        held = take(512 * MIB)
    with job.phase("hold them"):
        time.sleep(1)
    with job.phase("give them back"):
        give_back(held, 512 * MIB)
    with job.phase("spike of 300 MiB"):
        spike(300 * MIB)
    with job.phase("after the spike"):
        time.sleep(0.01)
    with job.phase("spike with the GIL held"):
        spike(300 * MIB, with_gil_held)
    with job.phase("after the spike with the GIL held"):
        time.sleep(0.01)
    with job.phase("read a mapped file"):
        mapped = read_mapped(
            next(filter(Path.exists, (Path(one, "known.bin") for one in sys.path)))
        )
    with job.phase("unmap it"):
        mapped.close()
    with job.phase("write 64 MiB of shared memory"):
        shared = mmap.mmap(-1, 64 * MIB)  # MAP_SHARED: the kernel counts it as shmem
        for _ in range(64):
            shared.write(bytes(MIB))
    with job.phase("close it"):
        shared.close()
    return model


def take(size: int, libc: ctypes.CDLL = with_gil_released) -> int:
    """Return the address of so many bytes of anonymous memory, every one written."""
    address: int = libc.mmap(None, size, _WRITABLE, _PRIVATE, -1, 0)
    libc.memset(address, 1, size)
    return address


def give_back(address: int, size: int, libc: ctypes.CDLL = with_gil_released) -> None:
    libc.munmap(address, size)


def spike(size: int, libc: ctypes.CDLL = with_gil_released) -> None:
    """Hold so many bytes for about 100 ms."""
    address = take(size, libc)
    libc.usleep(100_000)
    give_back(address, size, libc)


def read_mapped(path: Path) -> mmap.mmap:
    """Map a file and touch every page of it."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for offset in range(0, len(mapped), mmap.PAGESIZE):
        mapped[offset]
    return mapped
