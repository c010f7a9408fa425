"""Make a command's container as ``docker run`` does, plus a RAM limit and the keeper process."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import docker
from docker.errors import APIError

from weighin.cell import Cell
from weighin.errors import ConfigError
from weighin.isolation.base import Streams
from weighin.isolation.docker import host_config
from weighin.isolation.docker.attachment import Attachment, Standard
from weighin.isolation.docker.command import DockerCommand
from weighin.isolation.docker.engine import ENGINE_ERRORS, killed_at_birth, owner_labels
from weighin.isolation.docker.keeper import NOT_FOR_KEEPER, Keeper
from weighin.isolation.docker.mounts import Bind

STREAMS: Final = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}


def start(
    client: docker.APIClient,
    info: Mapping[str, Any],
    image: str,
    cell: Cell,
    folder: str,
    streams: Streams,
    mounts: Sequence[str],
    *,
    name: str,
    on_close: Callable[[], None],
) -> DockerCommand:
    """Start a cell's command in a new container ``name``; the caller removes it after an error.

    ``info`` is the engine's answer to ``docker info``.
    """
    is_limited = cell.ram_limit_bytes is not None
    with contextlib.ExitStack() as opened:
        opened.callback((keeper := Keeper()).close)
        opened.callback((standard := Standard(streams)).close)
        mounted = binds(folder, mounts, keeper)
        described = client.inspect_image(image)["Config"]  # type: ignore[no-untyped-call]
        command, variables = settings(described, cell, keeper)
        container = client.create_container(
            image,
            command[1:],
            entrypoint=command[:1],
            name=name,
            host_config=host_config.of_command(client, info, mounted, cell),
            stdin_open=True,
            tty=standard.is_terminal,
            user=host_config.user(info),
            working_dir=folder,
            environment=variables,
            labels=owner_labels() | {"weighin.cell": cell.id},
        )["Id"]
        stream = client.attach_socket(container, params=STREAMS)
        attachment = Attachment(stream, standard, resize=_resize(client, container))
        opened.callback(attachment.close)
        running = DockerCommand(client, container, keeper, attachment, on_close=on_close)
        try:
            running.begin(limited=is_limited)
        except APIError as error:
            if not (is_limited and killed_at_birth(error)):
                raise
            running.end_at_birth()
        opened.pop_all()
        return running


def settings(image: Mapping[str, Any], cell: Cell, keeper: Keeper) -> tuple[list[str], list[str]]:
    """Return the command line and the environment variables of a cell's container.

    As with ``docker run IMAGE COMMAND``, the command follows the image's entrypoint. Of this
    process's variables, a container gets only TERM. In the result, a variable without "=" removes
    the image's variable of that name.
    """
    of_image = dict(line.split("=", 1) for line in image.get("Env") or [] if "=" in line)
    term = {"TERM": os.environ["TERM"]} if "TERM" in os.environ else {}
    own = term | cell.environment
    apart = {n: v for n, v in (of_image | own).items() if n in NOT_FOR_KEEPER}
    command = keeper.command([*(image.get("Entrypoint") or []), *cell.command], apart)
    return command, [*(f"{n}={v}" for n, v in own.items() if n not in apart), *apart]


def binds(folder: str, mounts: Sequence[str], keeper: Keeper) -> list[Bind]:
    """Return a command's mounts: ``folder`` writable, ``mounts`` read-only, and the keeper's files.

    Raises:
        ConfigError: the folder is the root, or a path to mount does not exist.
    """
    if folder in ("", "/"):
        raise ConfigError(
            f"the current folder {folder or '(deleted)'} cannot be mounted into a container",
            "cd to the folder of the program",
        )
    wanted = dict.fromkeys(os.path.abspath(path) for path in mounts)  # noqa: PTH100 (links stay)
    for path in wanted:
        if not Path(path).exists():
            raise ConfigError(f"--mount {path}: there is no such file or folder")
    return [
        *(Bind(Path(path).resolve(), path) for path in wanted if path != folder),
        Bind(Path(folder), folder, writable=True),
        *keeper.binds(),
    ]


def _resize(client: docker.APIClient, container: str) -> Callable[[int, int], None]:
    """Return a function that sets the numbers of rows and columns of a container's terminal."""

    def set_size(rows: int, columns: int) -> None:
        with contextlib.suppress(*ENGINE_ERRORS):  # the container has ended
            client.resize(container, rows, columns)

    return set_size
