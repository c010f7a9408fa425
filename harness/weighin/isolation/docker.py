"""Run the worker (the measured process), or any command, in a Docker container with a RAM limit.

The image is empty: the container sees this machine's own programs at their paths (``visible``), and so runs the
same torch as a plain process. With ``--image``, a command runs in an image.

The container's first process is a shell that waits for the end of its standard input, which weighin holds open. So
the container and its cgroup outlive the measured process until weighin has read the counters, and end with weighin.
The measured process is an exec in this container: a shell stops itself, so that weighin can find it, limit it and
reset the peak, and then becomes the command.
"""

import io
import os
import secrets
import signal
import socket
import sys
import tarfile
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, Final

import docker
import docker.context
import docker.utils
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import LogConfig, Mount
from docker.utils.socket import SocketError, frames_iter
from requests import codes, exceptions

from weighin import child_process
from weighin.cell import Cell, ModelSpec
from weighin.errors import ConfigError, IsolationUnavailable
from weighin.isolation import cgroup, visible
from weighin.isolation.base import OWN_STREAMS, Exit, Isolation, Running, Streams
from weighin.phase_reporter import read_text
from weighin.probes import cgroup as groups
from weighin.probes import environment
from weighin.units import MIB

_NOT_STARTED: Final = (
    "weighin's shell, which starts the command in the container, did not start",
    "see whether a shell starts without weighin: docker run IMAGE sh",
)
_ELSEWHERE: Final = (
    "weighin needs a Docker engine on this machine: the processes of the current Docker engine are not"
    " visible here",
    "run weighin on the engine's machine, unset DOCKER_HOST, or use --isolation cgroup or process",
)
_ERRORS: Final = (DockerException, exceptions.RequestException)  # of the SDK and its HTTP library
_BARRIER: Final = (
    "kill -STOP $$; unset PWD OLDPWD SHLVL;"
    ' while [ "$1" != -- ]; do export "$1"; shift; done; shift; exec "$@"'
)
NOT_FOR_SHELLS: Final = frozenset(
    ("LD_PRELOAD", "LD_AUDIT", "LD_BIND_NOW", "GLIBC_TUNABLES", "PWD", "OLDPWD", "SHLVL")
)
"""Variables for the command alone: the shells' loader would obey them, or a shell sets them itself."""
_OUTPUT_S: Final = 5.0  # for output that the command has written before its end
_PAUSE_S: Final = 0.002
IMAGE: Final = "localhost/weighin-empty:latest"  # Podman needs a registry, and knows no other tag
_TMP: Final = "/tmp"  # noqa: S108 (inside the container)
_TMPFS_BYTES: Final = 64 * MIB  # for each of /tmp and /dev/shm; Docker's default for /dev/shm
_CLOSED: Final[Mapping[str, Any]] = {
    "network_mode": "none",
    "ipc_mode": "private",
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["label=disable", "no-new-privileges"],
    "pids_limit": 4096,  # includes threads; torch starts at least one per processor
    "shm_size": _TMPFS_BYTES,
    "tmpfs": {_TMP: f"size={_TMPFS_BYTES},mode=1777"},
}
_tried: set[Any] = set()  # the engines that have started a container for this process


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn an SDK error into IsolationUnavailable, in the engine's words."""
    try:
        yield
    except _ERRORS as error:
        repair = "see docker info, and sudo journalctl -u docker; or use another --isolation"
        if isinstance(error, ImageNotFound):
            repair = "docker pull IMAGE; or leave --image out, to see this machine's own programs"
        message = f"the Docker engine could not {doing}: {first_line(error)}"
        raise IsolationUnavailable(message, repair) from error


def first_line(error: BaseException) -> str:
    """Return the first line of the engine's message, without the text that the HTTP library adds."""
    text = str(getattr(error, "explanation", None) or error).strip().partition("\n")[0].rstrip()
    return text or type(error).__name__


class DockerIsolation(Isolation):
    """Runs a container for each cell. A worker has no network, no capabilities and a read-only root; its small /tmp
    (also HOME) and /dev/shm count as the cell's memory. Commands run in ``image``, or see what workers see.
    """

    name = "docker"
    limits = True

    def __init__(self, image: str = "") -> None:
        self._image = image

    def check(self) -> None:
        if self._info.get("ID") in _tried:
            return
        if self._info.get("KernelVersion") not in (None, os.uname().release):
            raise IsolationUnavailable(*_ELSEWHERE)
        # Podman says of cgroup v2 that it cannot limit swap; without swap, no container can use any.
        limits_swap = self._info.get("SwapLimit") or not cgroup.swap_is_on()
        if not (self._info.get("MemoryLimit") and limits_swap):
            why = "the Docker engine cannot limit the memory and swap of a container"
            repair = "boot with cgroup_enable=memory swapaccount=1 on the kernel's command line"
            raise IsolationUnavailable(why, repair)
        with Path(os.devnull).open("r+b", buffering=0) as nothing:
            streams = Streams(*[nothing.fileno()] * 3)
            cell = Cell(ModelSpec("", ""), "check", self.name, ram_limit_bytes=_TMPFS_BYTES)
            self.start(cell, [":"], "", streams).close()
        _tried.add(self._info.get("ID"))

    @explained("start a container")
    def start(
        self,
        cell: Cell,
        command: Sequence[str],
        folder: str = "",
        streams: Streams = OWN_STREAMS,
        mounts: Iterable[str] = (),
    ) -> Running:
        is_worker, mounts = cell.operation != "command", [*mounts]
        image = "" if is_worker else self._image
        if not is_worker and folder in ("", "/"):
            why = f"the current folder {folder or '(deleted)'} cannot be mounted into a container"
            raise ConfigError(why, "cd to the program's folder")
        for path in () if is_worker else mounts:
            if not Path(path).exists():
                why = f"mounts: {path}: there is no such file or folder"
                raise ConfigError(why, "correct the path")
        variables = {"TERM": os.environ["TERM"]} if not is_worker and "TERM" in os.environ else {}
        shell: Sequence[str] = visible.SHELL
        if image:
            shell, files = visible.own_shell()
            binds = visible.binds((), [folder, *mounts]) | files
            described = self._client.inspect_image(image)["Config"]  # type: ignore[no-untyped-call]
            lines = [line.split("=", 1) for line in described.get("Env") or () if "=" in line]
            variables |= {name: value for name, value in lines if name in NOT_FOR_SHELLS}
            command = (*(described.get("Entrypoint") or ()), *command)
        else:
            variables |= {"PATH": os.environ.get("PATH", os.defpath), "HOME": _TMP}
            if is_worker:
                variables |= environment.settings() | {"PYTHONDONTWRITEBYTECODE": "1"}
                variables["PYTHONPATH"] = child_process.path_of_worker(command[0])
            libraries = (variables | cell.environment).get("LD_PRELOAD", "").replace(":", " ")
            binds = visible.binds([*visible.of_machine(), *libraries.split()], [folder, *mounts])
        written = (folder, os.path.realpath(folder)) if folder else ()
        host: dict[str, Any] = {
            "auto_remove": True,
            "log_config": LogConfig(type="none"),
            "security_opt": ["label=disable"],
            "mounts": [Mount(t, s, "bind", read_only=t not in written) for t, s in binds.items()],
        }
        host |= _CLOSED if is_worker else {}
        if cell.ram_limit_bytes is not None and self._info.get("CgroupVersion", "1") == "1":
            host["mem_swappiness"] = 0
        if cell.needs_gpu:  # the driver's libraries are in /usr
            devices = [path for path in Path("/dev").glob("nvidia*") if path.is_char_device()]
            host["devices"] = [f"{path}:{path}:rwm" for path in devices]
        options = " ".join(self._info.get("SecurityOptions") or [])
        if "name=userns" in options:  # else this user's files would be another user's
            host["userns_mode"] = "host"
        # Root in a container of a rootless engine is this user.
        user = "" if "name=rootless" in options else f"{os.getuid()}:{os.getgid()}"
        where = _TMP if is_worker else folder
        container = self._client.create_container(
            image or self._empty_image,
            [*shell[1:], "-c", "read -r _"],
            entrypoint=list(shell[:1]),
            environment=sorted(NOT_FOR_SHELLS),  # without a value: removes the image's own
            name=f"weighin-{os.getpid()}-{secrets.token_hex(4)}",
            host_config=self._client.create_host_config(**host),
            stdin_open=True,
            user=user,
            working_dir=where,
            labels={
                "weighin.owner": groups.this_process(),
                "weighin.host": socket.gethostname(),
                "weighin.lock": groups.lock_suffix(),
            },
        )["Id"]
        variables |= cell.environment
        apart = [f"{n}={value}" for n, value in variables.items() if n in NOT_FOR_SHELLS]
        passed = [f"{n}={value}" for n, value in variables.items() if n not in NOT_FOR_SHELLS]
        line = [*shell, "-c", _BARRIER, "sh", *apart, "--", *command]
        told = {"cmd": line, "environment": passed, "user": user, "workdir": where}
        return DockerStarted(self._client, container, told, streams, cell.ram_limit_bytes)

    @explained("list the containers")
    def remove_stale(self) -> list[str]:
        removed = []
        host = f"weighin.host={socket.gethostname()}"
        for container in self._client.containers(all=True, filters={"label": host}):
            name, labels = container["Names"][0].lstrip("/"), container["Labels"]
            owner = labels["weighin.owner"]
            if groups.is_left_behind(f"{owner}.{labels.get('weighin.lock', '')}"):
                remove(self._client, name)
                removed.append(f"container {name} of process {owner.partition('-')[0]}")
        return removed

    def describe(self) -> dict[str, str]:
        keys = {"engine": "ServerVersion", "cgroup_driver": "CgroupDriver"}
        keys |= {"cgroup_version": "CgroupVersion", "storage_driver": "Driver"}
        facts = {name: self._info.get(key) for name, key in keys.items()} | {"image": self._image}
        return {name: str(value) for name, value in facts.items() if value}

    @cached_property
    def _client(self) -> docker.APIClient:
        return connect()

    @cached_property
    @explained("describe itself")
    def _info(self) -> dict[str, Any]:
        return dict(self._client.info())

    @cached_property
    def _empty_image(self) -> str:
        if not self._client.images(IMAGE):
            with tarfile.open(fileobj=(content := io.BytesIO()), mode="w") as file:
                (folder := tarfile.TarInfo("tmp")).type = tarfile.DIRTYPE
                folder.mode = 0o1777
                file.addfile(folder)
            self._client.import_image_from_data(content.getvalue(), *IMAGE.split(":"))
        return IMAGE


class DockerStarted(Running):
    """A worker or a command in a container: ``told`` are the arguments of its exec."""

    def __init__(
        self,
        client: docker.APIClient,
        container: str,
        told: Mapping[str, Any],
        streams: Streams,
        limit_bytes: int | None,
    ) -> None:
        self._client, self._container = client, container
        self._first_pid, self._first_stdin = 0, None  # of the container's first process
        self._code = 128 + signal.SIGKILL  # if the container ends before the engine tells another
        self._pump: Any = None
        try:
            self._pump = _Pump(streams, self.send_signal)
            self._start(told, limit_bytes)
            self._pump.begin()
            os.kill(self.pid, signal.SIGCONT)
        except BaseException:
            self.close()
            raise

    def _start(self, told: Mapping[str, Any], limit_bytes: int | None) -> None:
        """Start the container, and the shell of the command, which stops itself."""
        client, terminal = self._client, self._pump.is_terminal
        self._first_stdin = client.attach_socket(self._container, params={"stdin": 1, "stream": 1})
        client.start(self._container)
        self._first_pid = int(client.inspect_container(self._container)["State"]["Pid"])
        if not self._first_pid:  # it has ended
            raise IsolationUnavailable(*_NOT_STARTED)
        group = groups.memory_cgroup_of(self._first_pid)
        if group is None or self._container not in str(group):
            raise IsolationUnavailable(*_ELSEWHERE)
        self.cgroup = group
        self.exec = client.exec_create(self._container, stdin=True, tty=terminal, **told)["Id"]
        self._pump.stream = client.exec_start(self.exec, tty=terminal, socket=True)
        deadline = time.monotonic() + 30
        while not self.pid:
            state = client.exec_inspect(self.exec)
            is_over = not state["Running"] and state["ExitCode"] is not None
            if is_over or time.monotonic() > deadline:
                raise IsolationUnavailable(*_NOT_STARTED)
            with suppress(OSError):  # it has not started yet, or has ended
                status = read_text(f"/proc/{state['Pid']}/stat")
                if status.rpartition(")")[2].split()[0] == "T":
                    self.pid = int(state["Pid"])
                    self.process = child_process.open_process(self.pid)
            time.sleep(_PAUSE_S)
        if groups.outside(self.pid, group):
            raise IsolationUnavailable(
                "this Docker engine starts commands outside of their container's cgroup, so without a limit",
                "start a rootless engine as a service of your user: systemctl --user start docker",
            )
        if limit_bytes is not None:
            try:  # equal limits: no swap
                client.update_container(
                    self._container, mem_limit=limit_bytes, memswap_limit=limit_bytes
                )
            except NotFound as error:
                if "no such container" in first_line(error).lower():  # it was removed meanwhile
                    raise
                raise IsolationUnavailable(
                    "the engine cannot limit a container that runs (Podman 4.3 cannot):"
                    f" {first_line(error)}",
                    "use Docker, or --isolation cgroup or process",
                ) from None
        if terminal:
            columns, lines = os.get_terminal_size(self._pump.files[0])
            with suppress(*_ERRORS):  # of a terminal without a size
                client.exec_resize(self.exec, lines, columns)
        self.opened = groups.Cgroup(group, groups.pressure_file_of(self.pid))
        self.opened.reset_peak()  # so that the peak does not include the container's own start

    def has_ended(self) -> bool:
        if self.process is None:
            # The first thread may have ended before the others.
            threads = [*Path(f"/proc/{self.pid}/task").glob("*")]
            return self.ended is not None or (groups.is_exiting(self.pid) and len(threads) < 2)
        return self.ended is not None or bool(child_process.ready([self.process], 0))

    def reap(self) -> Exit:
        """Return how the command ended, after its other processes were killed and all output passed on."""
        if self.ended is None:
            self.kill()  # the engine waits for all processes that hold the output open
            self.ended = self._read_exit()
            self._pump.finish()
        return self.ended

    def _read_exit(self) -> Exit:
        deadline = time.monotonic() + child_process.PATIENCE_S
        # NotFound: the container was killed, and then removed.
        with explained("report how a command ended"), suppress(NotFound):
            while (state := self._client.exec_inspect(self.exec))["Running"]:
                if time.monotonic() > deadline:
                    return Exit(None, still_runs=True)
                time.sleep(_PAUSE_S)
            self._code = int(state["ExitCode"])
        if groups.is_exiting(self._first_pid):
            self.unseen = "the container was killed with its command, so the last counters are lost"
        # For the engine, "exit 137" and SIGKILL are the same; Linux tells them apart since 6.15.
        status = None if self.process is None else child_process.wait_status(self.process)
        number = self._code - 128 if status is None else os.WTERMSIG(status)
        return Exit(None, signal=number) if 0 < number <= signal.NSIG else Exit(self._code)

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
            with suppress(*_ERRORS):
                state = self._client.exec_inspect(self.exec)  # which goes with the container
                self._code = self._code if state["Running"] else int(state["ExitCode"])
            with suppress(*_ERRORS):  # ``close`` removes it again, and tells
                self._client.kill(self._container, signal.SIGKILL)

    def close(self) -> None:
        super().close()
        if self._pump:
            self._pump.close()
        _close_stream(self._first_stdin)
        remove(self._client, self._container)


class _Pump:
    """Copies between a command's stream and descriptors of this process, in two threads. If all three are
    terminals, the command gets a terminal of its own, and the user's is raw, so that each key, even Ctrl-C,
    reaches the command. Otherwise, the engine sends the streams in frames.
    """

    def __init__(self, streams: Streams, send_signal: Callable[[int], None]) -> None:
        self.stream: Any = None
        self._send_signal = send_signal
        # Another file may have got the number of a closed standard stream by now.
        own = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
        files = [n if file is None and own[n] else file for n, file in enumerate(streams)]
        with suppress(OSError, TypeError):  # no terminal, or not that of this session
            if os.tcgetpgrp(files[0]) != os.getpgrp():  # type: ignore[arg-type]
                files[0] = None  # a read in the background would stop this process
        self.files = [None if file is None else os.dup(file) for file in files]
        self.is_terminal = all(file is not None and os.isatty(file) for file in self.files)
        self._mode: list[Any] | None = None  # of the user's terminal
        self._is_writing = False
        self._over = os.eventfd(0)
        self._output = threading.Thread(target=self._pass_output, name="output", daemon=True)
        self._input = threading.Thread(target=self._pass_input, name="input", daemon=True)

    def begin(self) -> None:
        self._socket: socket.socket = getattr(self.stream, "_sock", self.stream)
        self._socket.settimeout(None)
        if self.is_terminal and self.files[0] is not None:
            self._mode = termios.tcgetattr(self.files[0])
            tty.setraw(self.files[0], termios.TCSADRAIN)
        self._output.start()
        self._input.start()

    def finish(self) -> None:
        """Copy the rest of the output, after the end of all processes, and close."""
        while self._output.is_alive():
            self._output.join(_OUTPUT_S)
            if not self._is_writing:  # a slow reader may block it
                self._end_stream()
        self.close()

    def close(self) -> None:
        """Restore the terminal, and close all files. Repeated calls do nothing."""
        if self._over < 0:
            return
        os.eventfd_write(self._over, 1)
        if self._output.is_alive():
            self._end_stream()
        for thread in (self._output, self._input):
            if thread.is_alive():
                thread.join(_OUTPUT_S)
        if self._mode is not None and self.files[0] is not None:
            termios.tcsetattr(self.files[0], termios.TCSADRAIN, self._mode)
        _close_stream(self.stream)
        self._close(0, 1, 2)
        os.close(self._over)
        self._over = -1

    def _end_stream(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _pass_output(self) -> None:
        with suppress(OSError, SocketError):  # reset by the engine, or closed here
            for number, data in frames_iter(self.stream, self.is_terminal):  # type: ignore[no-untyped-call]
                if (file := self.files[number]) is not None:
                    self._is_writing = True
                    if not child_process.write(file, data):
                        self._close(number)
                        # Without a container, the command would get this signal.
                        self._send_signal(signal.SIGPIPE)
                    self._is_writing = False
        self._close(1, 2)

    def _close(self, *numbers: int) -> None:
        for number in numbers:
            if (file := self.files[number]) is not None:
                self.files[number] = None
                os.close(file)

    def _pass_input(self) -> None:
        with suppress(OSError):  # the command has ended
            while (stdin := self.files[0]) is not None:
                if self._over in child_process.ready([stdin, self._over], inf):
                    return
                if not (data := os.read(stdin, 64 * 1024)):
                    break
                self._socket.sendall(data)
            self._socket.shutdown(socket.SHUT_WR)


def _close_stream(stream: Any) -> None:
    """Close a stream of the SDK, its socket, and the HTTP response that has the socket."""
    for each in (getattr(stream, "_response", None), stream, getattr(stream, "_sock", None)):
        if each is not None:
            each.close()


def remove(client: docker.APIClient, container: str) -> None:
    with explained(f"remove the container {container}"), suppress(NotFound):
        try:
            client.remove_container(container, v=True, force=True)
        except APIError as error:
            if error.status_code != codes.conflict:
                raise
            client.wait(container, timeout=10, condition="removed")  # it is being removed
            client.remove_container(container, v=True, force=True)  # in case that this failed


def connect() -> docker.APIClient:
    """Return a client of the engine that DOCKER_HOST or Docker's current context names."""
    address = os.environ.get("DOCKER_HOST", "the current context")
    try:
        settings: dict[str, Any] = dict(docker.utils.kwargs_from_env())
        if "base_url" not in settings:
            context = docker.context.ContextAPI.get_current_context()
            settings = {"base_url": context.Host, "tls": context.TLSConfig}
        address = settings["base_url"] or "unix:///var/run/docker.sock"
        # After a failure, the SDK would leave its own socket open.
        if address.startswith("unix://"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.connect(address.removeprefix("unix://"))
        return docker.APIClient(base_url=address, tls=settings.get("tls") or False)
    except (*_ERRORS, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise IsolationUnavailable(
            f"no Docker engine answers at {address}: {why}",
            "sudo systemctl start docker, or set DOCKER_HOST; for permission: sudo usermod -aG docker"
            " $USER, and log in again",
        ) from None
