"""A measured process in a container of its own: started stopped, found, let go, ended and removed.

The container's first process is a shell that only waits for the end of its standard input, which
weighin holds open. The container and its cgroup thus outlive the measured process until weighin has
read the counters, and end with weighin. The measured process is an exec in this container: a shell
that stops itself, so that weighin can find it, limit it and reset the cgroup's peak, and then becomes
the command.
"""

import os
import signal
import socket
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any, Final

import docker
from docker.errors import APIError, DockerException, NotFound
from docker.utils.socket import SocketError, frames_iter
from requests import codes, exceptions

from weighin import child_process
from weighin.child_process import PATIENCE_S, ready
from weighin.errors import IsolationUnavailable
from weighin.isolation.base import Exit, Running, Streams, connected
from weighin.probes import cgroup as groups

ENGINE_ERRORS: Final = (DockerException, exceptions.RequestException)
"""All errors that the SDK raises: its own errors, and errors of its HTTP library."""
_BARRIER: Final = (
    "kill -STOP $$; unset PWD OLDPWD SHLVL;"
    ' while [ "$1" != -- ]; do export "$1"; shift; done; shift; exec "$@"'
)
NOT_FOR_SHELLS: Final = frozenset(
    ("LD_PRELOAD", "LD_AUDIT", "LD_BIND_NOW", "GLIBC_TUNABLES", "PWD", "OLDPWD", "SHLVL")
)
"""Variables for the command alone: the shells' loader would obey them, or a shell sets them itself."""
_BIRTH_S: Final = 30.0
_OUTPUT_S: Final = 5.0  # for output that the command has written before its end
_RESIZE_S: Final = 0.25
_PAUSE_S: Final = 0.002
_REMOVE_S: Final = 10.0


class DockerStarted(Running):
    """A worker or, with ``streams``, a command in a container."""

    def __init__(
        self,
        client: docker.APIClient,
        container: str,
        shell: Sequence[str],
        command: Sequence[str],
        variables: Mapping[str, str],
        streams: Streams | None,
        limit_bytes: int | None,
        where: Mapping[str, str],
    ) -> None:
        """Start a container that exists, and in it a ``shell`` that becomes the command.

        ``where`` are arguments of ``exec_create``.
        """
        self._client, self._container = client, container
        self._exit: Exit | None = None
        self._first_pid, self._first_stdin = 0, None  # of the container's first process
        self._pump: Any = None
        apart = [f"{n}={value}" for n, value in variables.items() if n in NOT_FOR_SHELLS]
        passed = [f"{n}={value}" for n, value in variables.items() if n not in NOT_FOR_SHELLS]
        line = [*shell, "-c", _BARRIER, "sh", *apart, "--", *command]
        try:
            with connected(streams) as (own, self.channel):
                self._pump = _Pump(self, own)
            terminal = self._pump.is_terminal
            with explained("run a container"):
                self._first_stdin = client.attach_socket(
                    container, params={"stdin": 1, "stream": 1}
                )
                client.start(container)
                cgroup = self._find_container()
                options = {"stdin": True, "tty": terminal, "environment": passed, **where}
                self.exec = client.exec_create(container, line, **options)["Id"]
                self._pump.stream = client.exec_start(self.exec, tty=terminal, socket=True)
                self._await_barrier()
                if limit_bytes is not None:  # equal limits: no swap
                    client.update_container(
                        container, mem_limit=limit_bytes, memswap_limit=limit_bytes
                    )
            pressure = groups.pressure_file_of(self.pid)
            self.mark = groups.PeakMark(groups.MemoryCgroup(cgroup, pressure))
            self.mark.reset()  # so that the peak does not include the container's own start
            self._pump.begin()
            os.kill(self.pid, signal.SIGCONT)
        except BaseException:
            self.close()
            raise

    def _find_container(self) -> Path:
        state = self._client.inspect_container(self._container)["State"]
        if not (first := int(state["Pid"])):
            raise _not_started()
        with suppress(OSError):
            if self._container in groups.read_kernel(Path(f"/proc/{first}/cgroup")):
                self.cgroup, self._first_pid = groups.memory_cgroup_of(first), first
        if self.cgroup is None:
            raise elsewhere()
        return self.cgroup

    def _await_barrier(self) -> None:
        """Wait until the shell of the command has stopped itself."""
        deadline = time.monotonic() + _BIRTH_S
        while not self.pid:
            state = self._client.exec_inspect(self.exec)
            is_over = not state["Running"] and state["ExitCode"] is not None
            if is_over or time.monotonic() > deadline:
                raise _not_started()
            with suppress(OSError):  # it has not started yet, or has ended
                status = groups.read_kernel(Path(f"/proc/{state['Pid']}/stat"))
                if status.rpartition(")")[2].split()[0] == "T":
                    self.pid = int(state["Pid"])
                    self.process = child_process.open_process(self.pid)
            time.sleep(_PAUSE_S)

    def resize(self, rows: int, columns: int) -> None:
        with suppress(*ENGINE_ERRORS):  # the command has ended
            self._client.exec_resize(self.exec, rows, columns)

    @property
    def is_reaped(self) -> bool:
        return self._exit is not None

    def has_ended(self) -> bool:
        if self.is_reaped or self.process:
            return self.is_reaped or bool(ready([self.process or 0], 0))
        with explained("report how a command ended"):
            return not self._client.exec_inspect(self.exec)["Running"]

    def reap(self) -> Exit:
        """Return how the command ended, after its other processes were killed and all output passed on."""
        if self._exit is None:
            self.kill()  # the engine waits for all processes that hold the output open
            with explained("report how a command ended"):
                self._exit = self._read_exit()
            self._pump.finish()
        return self._exit

    def _read_exit(self) -> Exit:
        deadline = time.monotonic() + PATIENCE_S
        code = 128 + signal.SIGKILL
        with suppress(NotFound):  # the container was killed, and then removed
            while (state := self._client.exec_inspect(self.exec))["Running"]:
                if time.monotonic() > deadline:
                    return Exit(None, still_runs=True)
                time.sleep(_PAUSE_S)
            code = int(state["ExitCode"])
        if groups.is_exiting(self._first_pid):
            self.unseen = "the container was killed with its command, so the last counters are lost"
        # For the engine, "exit 137" and SIGKILL are the same; Linux tells them apart since 6.15.
        status = None if self.process is None else child_process.wait_status(self.process)
        number = code - 128 if status is None else os.WTERMSIG(status)
        return Exit(None, signal=number) if 0 < number <= signal.NSIG else Exit(code)

    def members(self) -> list[int]:
        pids = groups.members_of(self.cgroup) if self.cgroup else []
        return [pid for pid in pids if pid != self._first_pid]

    def kill(self) -> None:
        """Kill all processes of the container but its first; if this user may not, kill all of it."""
        killed: set[int] = set()
        try:
            while new := set(self.members()) - killed:
                child_process.signal_each(new)
                killed |= new
        except PermissionError:  # of a rootless engine
            with explained("kill a container"), suppress(APIError):
                self._client.kill(self._container, signal.SIGKILL)

    def close(self) -> None:
        super().close()
        if self._pump:
            self._pump.close()
        _close_stream(self._first_stdin)
        remove(self._client, self._container)


class _Pump:
    """Copies between a command's stream and descriptors of this process, in two threads.

    If all three are terminals, the command gets a terminal of its own, and the user's is raw, so that
    each key, even Ctrl-C, reaches the command. If one is none, the engine sends the streams in frames.
    """

    def __init__(self, command: DockerStarted, streams: Streams) -> None:
        """Copy the descriptors, because a caller may close the originals after the command's start."""
        self.stream: Any = None
        self._command = command
        # Another file may have got the number of a closed standard stream by now.
        own = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
        files = [n if file is None and own[n] else file for n, file in enumerate(streams)]
        self._files = [None if file is None else os.dup(file) for file in files]
        self._is_in_background = False  # a read of standard input would then stop this process
        with suppress(OSError, TypeError):  # no terminal, or not that of this session
            self._is_in_background = os.tcgetpgrp(self._files[0]) != os.getpgrp()  # type: ignore[arg-type]
        is_terminal = all(file is not None and os.isatty(file) for file in self._files)
        self.is_terminal = is_terminal and not self._is_in_background
        self._size: os.terminal_size | None = None
        self._mode: list[Any] | None = None
        self._is_writing = False
        self._woken, self._wake = os.pipe()
        self._output = threading.Thread(target=self._pass_output, name="output", daemon=True)
        self._input = threading.Thread(target=self._pass_input, name="input", daemon=True)

    def begin(self) -> None:
        """Begin to copy ``stream`` (of the SDK), before the command's first instruction."""
        self._socket: socket.socket = getattr(self.stream, "_sock", self.stream)
        self._socket.settimeout(None)
        if self.is_terminal and self._files[0] is not None:
            self._follow_size(self._files[0])
            self._mode = termios.tcgetattr(self._files[0])
            tty.setraw(self._files[0], termios.TCSADRAIN)
        self._output.start()
        self._input.start()

    def finish(self) -> None:
        """Copy the rest of the output, and restore the terminal, after the end of all processes."""
        deadline = time.monotonic() + _OUTPUT_S
        while self._output.is_alive():
            self._output.join(0.05)
            if time.monotonic() > deadline and not self._is_writing:  # a slow reader may block it
                self._end_stream()
        self._end_input()

    def _end_input(self) -> None:
        os.write(self._wake, b"\n")
        if self._input.is_alive():
            self._input.join(_OUTPUT_S)
        if self._mode is not None and self._files[0] is not None:
            termios.tcsetattr(self._files[0], termios.TCSADRAIN, self._mode)
            self._mode = None

    def close(self) -> None:
        """End the threads, and close all descriptors; repeated calls do nothing."""
        if self._wake >= 0:
            if self._output.is_alive():
                self._end_stream()
                self._output.join(_OUTPUT_S)
            self._end_input()
            _close_stream(self.stream)
            for file in (*self._files, self._woken, self._wake):
                if file is not None:
                    os.close(file)
            self._files, self._wake = [], -1

    def _end_stream(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _pass_output(self) -> None:
        with suppress(OSError, SocketError):  # reset by the engine, or closed here
            for number, data in frames_iter(self.stream, self.is_terminal):  # type: ignore[no-untyped-call]
                if (file := self._files[number]) is not None:
                    self._is_writing = True
                    if not child_process.write(file, data):
                        self._close(number)
                        # Without a container, the command would get this signal.
                        self._command.send_signal(signal.SIGPIPE)
                    self._is_writing = False
        self._close(1)
        self._close(2)

    def _close(self, number: int) -> None:
        if (file := self._files[number]) is not None:
            self._files[number] = None
            os.close(file)

    def _pass_input(self) -> None:
        stdin = None if self._is_in_background else self._files[0]
        with suppress(OSError):  # the command has ended
            if self._files[0] is None:
                self._socket.shutdown(socket.SHUT_WR)
            while True:
                awaited = [self._woken] if stdin is None else [stdin, self._woken]
                found = ready(awaited, _RESIZE_S if self.is_terminal else inf)
                if stdin is None or self._woken in found:
                    return
                if self.is_terminal:
                    self._follow_size(stdin)
                if stdin in found:
                    if data := os.read(stdin, 64 * 1024):
                        self._socket.sendall(data)
                    else:
                        self._socket.shutdown(socket.SHUT_WR)
                        stdin = None

    def _follow_size(self, terminal: int) -> None:
        with suppress(OSError):
            if (size := os.get_terminal_size(terminal)) != self._size:
                self._size = size
                self._command.resize(size.lines, size.columns)


def _not_started() -> IsolationUnavailable:
    return IsolationUnavailable(
        "weighin's shell, which starts the command in the container, did not start",
        "see whether a shell starts without weighin: docker run IMAGE sh",
    )


def _close_stream(stream: Any) -> None:
    """Close a stream of the SDK, its socket, and the HTTP response that has the socket."""
    for each in (getattr(stream, "_response", None), stream, getattr(stream, "_sock", None)):
        if each is not None:
            each.close()


def elsewhere() -> IsolationUnavailable:
    return IsolationUnavailable(
        "weighin needs a Docker engine on this machine: the processes of the current Docker"
        " engine are not visible here",
        "run weighin on the engine's machine, unset DOCKER_HOST, or use --isolation cgroup or process",
    )


def remove(client: docker.APIClient, container: str) -> None:
    """Remove a container and all processes in it; return when the container is gone."""
    deadline = time.monotonic() + _REMOVE_S
    with explained(f"remove the container {container}"):
        while True:
            try:
                return client.remove_container(container, v=True, force=True)
            except NotFound:
                return None
            except APIError as error:
                is_under_way = error.status_code == codes.conflict
                if not is_under_way or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn an SDK error into IsolationUnavailable: "the Docker engine could not {doing}"."""
    try:
        yield
    except ENGINE_ERRORS as error:
        reason = first_line(error)
        message = f"the Docker engine could not {doing}: {reason}"
        repair = "see the log of the Docker engine: sudo journalctl -u docker"
        if isinstance(error, exceptions.ConnectionError):
            message = f"the Docker engine has stopped: it could not {doing}"
            repair = "start the Docker engine again: sudo systemctl start docker"
        elif "minimum memory limit" in reason.lower():
            message = f"the Docker engine refuses so small a RAM limit: {reason}"
            repair = "give a larger --ram, or use --isolation cgroup"
        elif "bind source path does not exist" in reason or "mounts denied" in reason.lower():
            message = f"the Docker engine cannot access a folder of this machine: {reason}"
            repair = "use an engine that runs on this machine, or --isolation cgroup or process"
        raise IsolationUnavailable(message, repair) from error


def first_line(error: BaseException) -> str:
    """Return the first line of the engine's message, without the text that the HTTP library adds."""
    text = str(getattr(error, "explanation", None) or error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
