"""The image that workers run in: the torch of this very environment on a base with Python.

Its tag is a digest of all that goes in, so an image that exists is the right one. The wheels
travel in the build context: no step of the build needs a network.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

import docker
from docker.errors import ImageNotFound

from weighin.errors import IsolationUnavailable
from weighin.isolation.docker import wheels
from weighin.isolation.docker.engine import ENGINE_ERRORS, explained, first_line
from weighin.isolation.docker.image_build import BuildOrder, Progress, build
from weighin.suite.registry import data_folder

BASE_VARIABLE: Final = "WEIGHIN_BASE_IMAGE"
PYTHON: Final = "/opt/venv/bin/python"


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that an image is made of. ``pins`` are requirements such as "torch==2.13.0+cpu"."""

    base: str
    base_id: str
    pins: tuple[str, ...]
    dockerfile: str

    @property
    def tag(self) -> str:
        text = "\0".join((self.base, self.base_id, *self.pins, self.dockerfile))
        return f"weighin:{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def ensure_image(client: docker.APIClient, base: str, progress: Progress) -> str:
    """Return the tag of the image for this environment on ``base``; builds it where it is missing.

    Raises:
        IsolationUnavailable: no base image, no wheel, or a build that failed, with the repair.
    """
    recipe = read_recipe(base, find_base(client, base, progress))
    with explained("build the image"):
        if not client.images(recipe.tag):
            order = BuildOrder(recipe.tag, recipe.base, recipe.pins, recipe.dockerfile)
            build(client, order, progress)
    return recipe.tag


def read_recipe(base: str, base_id: str) -> Recipe:
    """Return what the image on ``base`` consists of in this environment."""
    folder = data_folder("docker")
    return Recipe(
        base=base,
        base_id=base_id,
        pins=wheels.installed_pins(folder / "requirements.txt"),
        dockerfile=(folder / "Dockerfile").read_text(),
    )


def find_base(client: docker.APIClient, base: str, progress: Progress) -> str:
    """Return the ID of the base image; pulls it where the engine does not have it.

    Raises:
        IsolationUnavailable: it is not there, and no registry gives it.
    """
    try:
        try:
            return _image_id(client, base)
        except ImageNotFound:
            progress(f"pulling {base}")
            repository, tag = (
                base.rsplit(":", 1) if ":" in base.rpartition("/")[2] else (base, "latest")
            )
            client.pull(repository, tag=tag)
            return _image_id(client, base)
    except ENGINE_ERRORS as error:
        raise IsolationUnavailable(
            f"the base image {base} is not here and cannot be pulled: {first_line(error)}",
            f"name one that is here: export {BASE_VARIABLE}=IMAGE (docker images lists them), "
            "or make one without a registry: sudo docker/make-base weighin-base:bookworm",
        ) from error


def _image_id(client: docker.APIClient, name: str) -> str:
    return str(client.inspect_image(name)["Id"])  # type: ignore[no-untyped-call]
