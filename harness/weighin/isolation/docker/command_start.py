"""Make the container of a command: as that of ``docker run``, with a keeper and a limit."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Asked:
    """A cell's command, its image and working folder, and the paths that it sees read-only."""

    image: str
    cell: Cell
    folder: str
    streams: Streams
    mounts: Sequence[str] = ()
    rates: host_config.Rates = ()


def start(
    client: docker.APIClient,
    info: Mapping[str, Any],
    asked: Asked,
    *,
    name: str,
    on_close: Callable[[], None],
) -> DockerCommand:
    """Start a command in a new container of this name, which the caller removes after an error.

    ``info`` is the engine's description of itself.
    """
    cell = asked.cell
    is_limited = cell.ram_limit_bytes is not None
    with contextlib.ExitStack() as opened:
        opened.callback((keeper := Keeper()).close)
        opened.callback((standard := Standard(asked.streams)).close)
        container = _create(client, info, asked, name, keeper, tty=standard.is_terminal)
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


def _create(
    client: docker.APIClient,
    info: Mapping[str, Any],
    asked: Asked,
    name: str,
    keeper: Keeper,
    *,
    tty: bool,
) -> str:
    cell = asked.cell
    mounted = binds(asked.folder, asked.mounts, keeper)
    image = client.inspect_image(asked.image)["Config"]  # type: ignore[no-untyped-call]
    command, variables = settings(image, cell, keeper)
    created = client.create_container(
        asked.image,
        command[1:],
        entrypoint=command[:1],
        name=name,
        host_config=host_config.of_command(
            client, info, mounted, cell.ram_limit_bytes, asked.rates
        ),
        stdin_open=True,
        tty=tty,
        user=host_config.user(info),
        working_dir=asked.folder,
        environment=variables,
        labels=owner_labels() | {"weighin.cell": cell.id},
    )
    return str(created["Id"])


def settings(image: Mapping[str, Any], cell: Cell, keeper: Keeper) -> tuple[list[str], list[str]]:
    """Return the command of a cell's container, and its variables; a bare name removes the image's.

    As with ``docker run IMAGE COMMAND``, the command stands after the image's entrypoint. Of this
    process's variables, a container gets only TERM.
    """
    of_image = dict(line.split("=", 1) for line in image.get("Env") or [] if "=" in line)
    asked = {name: os.environ[name] for name in ("TERM",) if name in os.environ} | cell.environment
    apart = {n: v for n, v in (of_image | asked).items() if n in NOT_FOR_KEEPER}
    command = keeper.command([*(image.get("Entrypoint") or []), *cell.command], apart)
    return command, [*(f"{n}={v}" for n, v in asked.items() if n not in apart), *apart]


def binds(folder: str, mounts: Sequence[str], keeper: Keeper) -> list[Bind]:
    """Return what a command's container mounts: its folder writable, and ``mounts`` read-only.

    Raises:
        ConfigError: the folder is the root, or a path to mount does not exist.
    """
    if Path(folder) == Path("/"):
        raise ConfigError(
            "the current folder / cannot be mounted into a container",
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
    """Return a function that sets the (rows, columns) of a container's terminal."""

    def set_size(rows: int, columns: int) -> None:
        with contextlib.suppress(*ENGINE_ERRORS):  # it has ended
            client.resize(container, rows, columns)

    return set_size
