"""Building the image: its room, its progress, its errors, and what it leaves; without an engine."""

import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import docker
import pytest
import requests.exceptions

from weighin.errors import IsolationUnavailable
from weighin.isolation.docker import image, wheels
from weighin.isolation.docker.image import ensure_image
from weighin.units import GIB, MIB

PINS = ("torch==2.13.0",)


class Engine:
    """An engine that has the base, and builds as it is told to."""

    def __init__(self, root: Path, events: list[dict[str, str]] | BaseException) -> None:
        self._root, self._events = root, events
        self.pruned: list[tuple[str, str]] = []
        self.built: list[str] = []

    def info(self) -> dict[str, str]:
        return {"DockerRootDir": str(self._root)}

    def images(self, _: str) -> list[str]:
        return []

    def inspect_image(self, _: str) -> dict[str, str]:
        return {"Id": "sha256:base"}

    def build(self, *, path: str, tag: str, **options: object) -> Iterator[dict[str, str]]:
        self.options = {"tag": tag, **options}
        self.built = sorted(file.name for file in Path(path).iterdir())
        if isinstance(self._events, BaseException):
            raise self._events
        yield from self._events

    def prune_images(self, filters: dict[str, Any]) -> None:
        assert filters["dangling"] is True
        self.pruned.append(("images", filters["label"]))

    def prune_containers(self, filters: dict[str, Any]) -> None:
        self.pruned.append(("containers", filters["label"]))


OURS = {
    (kind, label)
    for kind in ("images", "containers")
    for label in ("weighin.stage=install", "weighin.image=1")
}
STEPS = [
    {"stream": "Step 1/2 : FROM base\n"},
    {"stream": " ---> abc\n"},
    {"stream": "Step 2/2 : RUN\n"},
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wheels of 3 MiB of a torch of 5 GiB; nothing is fetched."""

    def download(pins: Any, target: Any, folder: Path, *_: Any) -> None:
        (folder / "wheels").mkdir()
        (folder / "wheels" / "torch.whl").write_bytes(bytes(3 * MIB))

    monkeypatch.setattr(wheels, "download", download)
    monkeypatch.setattr(wheels, "installed_pins", lambda *_: PINS)
    monkeypatch.setattr(wheels, "installed_bytes", lambda _: 5 * GIB)
    monkeypatch.setattr(image, "probe", lambda *_: wheels.Target("3.11", "x86_64", 36))
    return tmp_path


def free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(image, "free_bytes", lambda _: free_bytes)


def built(engine: Engine) -> list[str]:
    said: list[str] = []
    ensure_image(engine, "base", said.append)  # type: ignore[arg-type]
    return said


def test_a_build_without_room_is_refused_before_anything_is_fetched(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 9 * GIB)
    monkeypatch.setattr(wheels, "download", lambda *_: pytest.fail("it was fetched"))
    with pytest.raises(IsolationUnavailable) as caught:
        built(Engine(here, STEPS))
    assert str(caught.value) == (
        f"the image of torch 2.13.0 needs 10.000 GiB in {here}, the Docker engine's folder, but"
        " only 9.000 GiB are free\nfree some disk space: docker system df shows what takes it up"
    )
    assert caught.value.exit_code == 3


def test_an_engine_on_another_machine_is_asked_to_build_all_the_same(here: Path) -> None:
    assert "Step 1/2 : FROM base" in built(Engine(here / "not here", STEPS))


def test_a_build_says_how_much_it_does_and_each_of_its_steps(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 100 * GIB)
    engine = Engine(here, STEPS)
    said = built(engine)
    assert said[0].startswith("building weighin:")
    assert said[0].endswith(
        " on base, which later runs use again: it takes 5.000 GiB of disk, and twice as much during the build"
    )
    assert said[1:] == [
        "fetching the wheels of torch and its dependencies",
        "sending 3.000 MiB of wheels to the Docker engine",
        "Step 1/2 : FROM base",
        "Step 2/2 : RUN",
    ]
    assert engine.built == ["Dockerfile", "wheels"]


def test_a_build_has_no_network_and_leaves_no_containers(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 100 * GIB)
    engine = Engine(here, STEPS)
    built(engine)
    assert str(engine.options.pop("tag")).startswith("weighin:")
    assert engine.options == {
        "buildargs": {"BASE_IMAGE": "base"},
        "network_mode": "none",
        "rm": True,
        "forcerm": True,
        "decode": True,
    }


@pytest.mark.parametrize(
    ("events", "text"),
    [
        (
            [*STEPS, {"error": "write /opt/venv/x.so: no space left on device"}],
            "write /opt/venv/x.so: no space left on device (in Step 2/2 : RUN)\nfree some disk"
            " space: docker system df shows what takes it up",
        ),
        (
            [
                *STEPS,
                {"stream": "No module named venv\n"},
                {"stream": "Removing intermediate container 0123\n"},
                {"error": "returned a non-zero code: 1"},
            ],
            "returned a non-zero code: 1 (in Step 2/2 : RUN): No module named venv\n"
            "use a base image with python3 and its venv module, such as python:3.11-slim-bookworm",
        ),
    ],
)
def test_a_build_that_fails_shows_the_engine_s_own_error_and_prunes_what_is_ours(
    here: Path, monkeypatch: pytest.MonkeyPatch, events: list[dict[str, str]], text: str
) -> None:
    free(monkeypatch, 100 * GIB)
    engine = Engine(here, events)
    with pytest.raises(IsolationUnavailable) as caught:
        built(engine)
    assert str(caught.value).partition(" cannot be built: ")[2] == text
    assert set(engine.pruned) == OURS


def test_an_interrupted_build_prunes_what_is_ours(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 100 * GIB)
    engine = Engine(here, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        built(engine)
    assert set(engine.pruned) == OURS


def test_an_engine_that_cannot_prune_does_not_hide_why_the_build_failed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 100 * GIB)

    class Tired(Engine):
        def prune_images(self, filters: dict[str, Any]) -> None:
            raise docker.errors.APIError("a prune operation is already running")

    with pytest.raises(IsolationUnavailable, match="the real one"):
        built(Tired(here, [{"error": "the real one"}]))


@pytest.mark.parametrize("fault", ["disk", "engine"])
def test_a_build_whose_wheels_cannot_be_written(
    here: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    free(monkeypatch, 100 * GIB)
    error = (
        OSError(28, "No space left on device")
        if fault == "disk"
        else requests.exceptions.ConnectionError("gone")
    )

    def download(*_: object) -> None:
        raise error

    monkeypatch.setattr(wheels, "download", download)
    engine = Engine(here, STEPS)
    with pytest.raises(IsolationUnavailable) as caught:
        built(engine)
    assert ("TMPDIR" in caught.value.repair) == (fault == "disk")
    assert str(error).removeprefix("[Errno 28] ") in caught.value.message
    assert set(engine.pruned) == OURS


def test_the_wheels_fit_the_python_of_the_base_image(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def run(_client: object, base: str, python: str, _code: str) -> str:
        asked.append((base, python))
        return "3.9.2 aarch64 glibc 2.31"

    monkeypatch.setattr(image, "run_python", run)
    client: Any = object()
    assert image.probe(client, "base") == wheels.Target("3.9.2", "aarch64", 31)
    assert asked == [("base", "python3")]


def test_a_pip_that_fails_is_an_error_and_leaves_no_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho 'ERROR: no wheel' >&2\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    (context := tmp_path / "context").mkdir()
    with pytest.raises(IsolationUnavailable, match="no wheel"):
        wheels.download(PINS, wheels.Target("3.11", "x86_64", 36), context, print)
    assert [path.name for path in context.iterdir()] == ["constraints.txt"]


def test_the_roots_are_fetched_for_the_target_and_the_rest_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = tmp_path / "python"
    pip.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/asked\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    (context := tmp_path / "context").mkdir()
    pins = ("numpy==2", "other==1", "rich==14", "safetensors==0.6", "torch==2.13.0")
    wheels.download(pins, wheels.Target("3.5.1", "odd", 36), context, print, ("rich",))
    asked = (tmp_path / "asked").read_text().splitlines()
    wanted = {"numpy==2", "rich==14", "safetensors==0.6", "torch==2.13.0"}
    assert {one for one in asked if "==" in one} >= wanted
    assert "other==1" not in asked
    assert asked[asked.index("--dest") + 1] == str(context / "wheels")
    assert asked[asked.index("--python-version") + 1] == "3.5.1"
    assert (context / "constraints.txt").read_text().splitlines() == list(pins)


PIP = """#!{python}
import pathlib, sys, time, os
out = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
unfinished = pathlib.Path(os.environ["TMPDIR"]) / "part"
unfinished.write_bytes(bytes(2 << 20))
for _ in range(6000):
    if pathlib.Path(sys.argv[0]).with_name("said").exists(): break
    time.sleep(0.01)
out.mkdir()
unfinished.rename(out / "torch.whl")
"""


def test_fetching_says_how_many_bytes_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = tmp_path / "python"
    pip.write_text(PIP.format(python=sys.executable))
    pip.chmod(pip.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(pip))
    monkeypatch.setattr(wheels, "_SAY_EVERY_S", 0.2)
    (context := tmp_path / "context").mkdir()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "2.000" in text:
            (tmp_path / "said").touch()

    wheels.download(PINS, wheels.Target("3.11", "x86_64", 36), context, say)
    assert "fetched 2.000 MiB of wheels" in said
    assert sorted(path.name for path in context.iterdir()) == ["constraints.txt", "wheels"]


def test_a_package_is_fetched_however_a_strategy_spells_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], *_: object) -> tuple[int, str]:
        commands.append(command)
        return 0, ""

    monkeypatch.setattr(wheels, "_run", run)
    target = wheels.Target("3.11", "x86_64", 36)
    pins = ("my-fancy-pkg==1.0", "torch==2.13.0", "unasked==3.0")
    wheels.download(pins, target, tmp_path, lambda _: None, ("My.Fancy_Pkg",))
    (command,) = commands
    assert [word for word in command if "==" in word] == ["my-fancy-pkg==1.0", "torch==2.13.0"]


def test_the_size_of_what_is_installed_is_that_of_its_files() -> None:
    import importlib.metadata

    version = importlib.metadata.version("numpy")
    size = wheels.installed_bytes((f"numpy=={version}",))
    assert 10 * MIB < size < 500 * MIB
    assert wheels.installed_bytes((f"numpy=={version}", "not-installed==1")) == size


def test_a_build_needs_room_for_the_wheels_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 10 * GIB + 3 * MIB - 1)
    engine = Engine(here, STEPS)
    with pytest.raises(
        IsolationUnavailable, match=r"needs 10\.003 GiB in .*, but only 10\.003 GiB"
    ):
        built(engine)
    assert engine.built == []
    free(monkeypatch, 10 * GIB + 3 * MIB)
    assert built(engine)[-1] == "Step 2/2 : RUN"
