"""The image in which workers run: this environment's torch on a base image with Python.

The image's tag is a digest of everything that the image is built from, so that an image with this
tag need not be built again. The build context contains the wheels, so that no build step needs a
network.
"""

from typing import Final

import docker
import docker.utils
from docker.errors import ImageNotFound

from weighin.errors import IsolationUnavailable
from weighin.isolation.docker import wheels
from weighin.isolation.docker.engine import ENGINE_ERRORS, explained, first_line
from weighin.isolation.docker.image_build import Progress, Recipe, build
from weighin.suite.registry import data_folder

BASE_VARIABLE: Final = "WEIGHIN_BASE_IMAGE"
PYTHON: Final = "/opt/venv/bin/python"


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
    """Return the ID of an image; pull the image if the engine does not have it.

    ``is_base`` tells whether weighin's own image is built on it. The repair in an error names
    another option for a base image (WEIGHIN_BASE_IMAGE) than for an image that is used as it is
    (--image).

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
            f"the image {name} does not exist here and cannot be pulled: {first_line(error)}",
            "choose an image that `docker images` lists: --image IMAGE; or leave --image out for"
            " weighin's own image",
        )
    return IsolationUnavailable(
        f"the base image {name} does not exist here and cannot be pulled: {first_line(error)}",
        f"choose an image that `docker images` lists: export {BASE_VARIABLE}=IMAGE; "
        "or make a base image without a registry: sudo docker/make-base weighin-base:bookworm",
    )


def _image_id(client: docker.APIClient, name: str) -> str:
    return str(client.inspect_image(name)["Id"])  # type: ignore[no-untyped-call]
