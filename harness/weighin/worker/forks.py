"""Run a function in several forked processes at the same time, and read their private memory.

The resident set size of a forked process includes pages that it shares with its parent. The private
dirty memory is the memory that the child has copied, because the child wrote to it.
"""

import os
import traceback
from collections.abc import Callable
from signal import Signals

import torch

from weighin.probes.process import read_private_dirty

_NUMBER_BYTES = 8


class _Fork:
    """A forked process that runs a function and then reports the process's private memory.

    The process ends when its parent closes a pipe with the write end ``end`` and the read end
    ``until``.
    """

    def __init__(self, function: Callable[[], object], until: int, end: int) -> None:
        self._result, result = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(end)
            _run(function, result, until)
        os.close(result)

    def private_bytes(self) -> int:
        """Wait until the function has ended, and return the process's private dirty memory, in bytes.

        Raises:
            RuntimeError: the process ended before the function did.
        """
        if len(number := os.read(self._result, _NUMBER_BYTES)) == _NUMBER_BYTES:
            return int.from_bytes(number)
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        code = os.waitstatus_to_exitcode(status)
        how = f"was ended by {Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise RuntimeError(f"a forked process {how}")

    def close(self) -> None:
        if self._pid:
            os.waitpid(self._pid, 0)
        os.close(self._result)


def forked(function: Callable[[], object], number: int) -> tuple[int, ...]:
    """Run a function in ``number`` forked processes; return the private dirty memory of each, in bytes.

    All processes stay alive until the last one has run the function.
    """
    until, end = os.pipe()
    forks: list[_Fork] = []
    try:
        forks.extend(_Fork(function, until, end) for _ in range(number))
        return tuple(fork.private_bytes() for fork in forks)
    finally:
        os.close(end)
        for fork in forks:
            fork.close()
        os.close(until)


def _run(function: Callable[[], object], result: int, until: int) -> None:
    """Run the function in the child, and end the child when the parent has closed ``until``."""
    code = 1
    try:
        torch.set_num_threads(1)  # the threads of the parent do not exist here
        function()
        os.write(result, read_private_dirty().to_bytes(_NUMBER_BYTES))
        os.read(until, 1)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
