"""The image in which workers run: this environment's torch on a base image with Python.

The image's tag is a digest of everything that the image is built from, so that an image with this
tag need not be built again. The build context contains the wheels, so that no build step needs a
network.
"""

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import docker
import docker.utils
from docker.errors import ImageNotFound

from weighin.child_process import last_line
from weighin.errors import IsolationUnavailable
from weighin.isolation.docker import wheels
from weighin.isolation.docker.engine import ENGINE_ERRORS, explained, first_line, owner_labels
from weighin.suite.registry import data_folder
from weighin.units import format_bytes

DEFAULT_BASE: Final = "python:3.11-slim-bookworm"
BASE_VARIABLE: Final = "WEIGHIN_BASE_IMAGE"
PYTHON: Final = "/opt/venv/bin/python"
Progress = Callable[[str], None]

_LABELS: Final = ("weighin.stage=install", "weighin.image=1")
_OF_THE_ENGINE: Final = (
    "---> ",
    "Removing intermediate container",
)  # the engine prints these, and no build step
_PYTHON_REPAIR: Final = f"use a base image with python3 and its venv module, such as {DEFAULT_BASE}"
_ROOM_REPAIR: Final = "free some disk space: docker system df shows what takes it up"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that an image is built from, with ``pins`` such as "torch==2.13.0+cpu".

    ``packages`` are the names of those pinned packages that only a strategy needs, and not the
    worker itself.
    """

    base: str
    base_id: str
    pins: tuple[str, ...]
    dockerfile: str
    packages: tuple[str, ...] = ()

    @property
    def tag(self) -> str:
        text = "\0".join((self.base, self.base_id, *self.pins, self.dockerfile))
        return f"weighin:{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def ensure_image(
    client: docker.APIClient, base: str, progress: Progress, packages: tuple[str, ...] = ()
) -> str:
    """Return the tag of the image for this environment on ``base``; build a missing image.

    The image also contains ``packages``, at the versions of this environment.

    Raises:
        IsolationUnavailable: the base image or a wheel is missing, or the build failed.
    """
    folder = data_folder("docker")
    recipe = Recipe(
        base=base,
        base_id=find_image(client, base, progress),
        pins=wheels.installed_pins(folder / "requirements.txt", packages),
        dockerfile=(folder / "Dockerfile").read_text(),
        packages=packages,
    )
    with explained("build the image"):
        if not client.images(recipe.tag):
            build(client, recipe, progress)
    return recipe.tag


def find_image(
    client: docker.APIClient, name: str, progress: Progress, *, is_base: bool = True
) -> str:
    """Return the ID of a Docker image; pull the image if the engine does not have the image.

    ``is_base`` tells whether weighin builds its own image on this image. The advice in an error
    names WEIGHIN_BASE_IMAGE for such a base image, and --image for an image that is used as it is.

    Raises:
        IsolationUnavailable: the engine does not have the image and cannot pull it.
    """
    try:
        try:
            return _image_id(client, name)
        except ImageNotFound:
            progress(f"pulling {name}")
            repository, tag = docker.utils.parse_repository_tag(name)
            client.pull(repository, tag=tag or "latest")
            return _image_id(client, name)
    except ENGINE_ERRORS as error:
        raise _no_image(name, error, is_base=is_base) from error


def check_image(client: docker.APIClient, name: str, *, is_base: bool = True) -> None:
    """Raise IsolationUnavailable if the engine does not have an image and no registry offers it."""
    try:
        try:
            _image_id(client, name)
        except ImageNotFound:
            client.inspect_distribution(name)  # type: ignore[no-untyped-call]  # pulls nothing
    except ENGINE_ERRORS as error:
        raise _no_image(name, error, is_base=is_base) from error


def _no_image(name: str, error: BaseException, *, is_base: bool) -> IsolationUnavailable:
    if not is_base:
        return IsolationUnavailable(
            f"the image {name} does not exist here and cannot be pulled from a registry:"
            f" {first_line(error)}",
            "choose an image that `docker images` lists: --image IMAGE; or leave --image out for"
            " weighin's own image",
        )
    return IsolationUnavailable(
        f"the base image {name} does not exist here and cannot be pulled from a registry:"
        f" {first_line(error)}",
        f"choose an image that `docker images` lists: export {BASE_VARIABLE}=IMAGE; "
        "or make a base image without a registry: sudo docker/make-base weighin-base:bookworm",
    )


def _image_id(client: docker.APIClient, name: str) -> str:
    return str(client.inspect_image(name)["Id"])  # type: ignore[no-untyped-call]


def build(client: docker.APIClient, recipe: Recipe, progress: Progress) -> None:
    """Build an image, and remove the leftovers of the build, even if the build fails.

    Raises:
        IsolationUnavailable: too little disk space, a missing wheel, or an error of the engine.
    """
    _prune(client)  # leftovers of a killed build use disk space that this build needs
    installed = wheels.installed_bytes(recipe.pins)
    progress(
        f"building {recipe.tag} on {recipe.base}, which later runs use again: it takes"
        f" {format_bytes(installed)} of disk, and twice as much during the build"
    )
    # During a build, the files exist in the first stage and in the final image.
    _check_room(client, recipe, 2 * installed)
    target = probe(client, recipe.base)
    try:
        with tempfile.TemporaryDirectory(prefix="weighin-image-") as name:
            context = Path(name)
            progress("fetching the wheels of torch and its dependencies")
            wheels.download(recipe.pins, target, context, progress, recipe.packages)
            (context / "constraints.txt").unlink(missing_ok=True)
            (context / "Dockerfile").write_text(recipe.dockerfile)
            size = sum(file.stat().st_size for file in (context / "wheels").iterdir())
            _check_room(client, recipe, 2 * installed + size)
            progress(f"sending {format_bytes(size)} of wheels to the Docker engine")
            for line in _steps(client, recipe, context):
                progress(line)
    except OSError as error:
        if isinstance(error, ENGINE_ERRORS):  # the errors of requests are OSErrors, too
            raise
        raise IsolationUnavailable(
            f"cannot write the wheels for the image: {error}",
            "free some space in that folder, or set TMPDIR to a folder that has room for twice"
            " the size of torch's wheels",
        ) from error
    finally:
        _prune(client)


def probe(client: docker.APIClient, base: str) -> wheels.Target:
    return wheels.read_target(run_python(client, base, "python3", wheels.PROBE))


def run_python(client: docker.APIClient, image: str, python: str, code: str) -> str:
    """Run ``code`` in a fresh container of ``image`` without network, and return what it prints.

    Raises:
        IsolationUnavailable: ``python`` does not run, or ``code`` failed; in the second case, the
            message ends with the last line that ``code`` printed.
    """
    settings = client.create_host_config(network_mode="none")
    container = None
    try:
        container = client.create_container(
            image, [python, "-c", code], host_config=settings, labels=owner_labels()
        )["Id"]
        client.start(container)
        status = client.wait(container)["StatusCode"]
        output: bytes = client.logs(container, stdout=True, stderr=bool(status))
    except ENGINE_ERRORS as error:
        raise IsolationUnavailable(
            f"{python} does not run in the image {image}: {first_line(error)}",
            _PYTHON_REPAIR,
        ) from error
    finally:
        if container:
            client.remove_container(container, v=True, force=True)
    if status:
        raise IsolationUnavailable(
            f"{python} failed in the image {image}: {last_line(output) or 'no output'}",
            _PYTHON_REPAIR,
        )
    return output.decode(errors="replace").strip()


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _check_room(client: docker.APIClient, recipe: Recipe, needed_bytes: int) -> None:
    root = Path(client.info().get("DockerRootDir") or "/nowhere")
    try:
        free = free_bytes(root)
    except OSError:  # an engine on another machine or in a virtual machine
        return
    if free < needed_bytes:
        torch = next((pin for pin in recipe.pins if pin.startswith("torch==")), recipe.tag)
        raise IsolationUnavailable(
            f"the image of {torch.replace('==', ' ')} needs {format_bytes(needed_bytes)} in {root},"
            f" the Docker engine's folder, but only {format_bytes(free)} are free",
            _ROOM_REPAIR,
        )


def _steps(client: docker.APIClient, recipe: Recipe, context: Path) -> Iterator[str]:
    step = output = ""
    for event in client.build(
        path=str(context),
        tag=recipe.tag,
        buildargs={"BASE_IMAGE": recipe.base},
        network_mode="none",
        rm=True,
        forcerm=True,
        decode=True,
    ):
        if "error" in event:
            raise _failed(recipe, str(event["error"]).strip(), step, output)
        line = last_line(str(event.get("stream", "")).encode())
        if line.startswith("Step "):
            step, output = line, ""
            yield line
        elif line and not line.startswith(_OF_THE_ENGINE):
            output = line


def _failed(recipe: Recipe, error: str, step: str, output: str) -> IsolationUnavailable:
    where = f" (in {step})" if step else ""
    last = f": {output}" if output and output not in error else ""
    is_full = "no space left" in error or "quota exceeded" in error
    return IsolationUnavailable(
        f"the image {recipe.tag} cannot be built: {error}{where}{last}",
        _ROOM_REPAIR if is_full else _PYTHON_REPAIR,
    )


def _prune(client: docker.APIClient) -> None:
    """Remove untagged images and ended containers of weighin's builds, found by their labels."""
    for label in _LABELS:
        with contextlib.suppress(
            *ENGINE_ERRORS
        ):  # a failure here must not hide the error of the build
            client.prune_containers(filters={"label": label})  # type: ignore[no-untyped-call]
    for label in _LABELS:
        with contextlib.suppress(*ENGINE_ERRORS):
            client.prune_images(  # type: ignore[no-untyped-call]
                filters={"dangling": True, "label": label}
            )
