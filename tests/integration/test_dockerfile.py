"""docker/Dockerfile builds, and weighin runs in its image."""

import os
import subprocess

import pytest
from typed import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.nightly, pytest.mark.index, pytest.mark.slow]


def docker(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(("docker", *words), capture_output=True, text=True, check=False)


def test_weighin_runs_in_the_image_of_the_dockerfile() -> None:
    base = "python:3.11-slim-bookworm"
    if docker("pull", base).returncode:
        pytest.skip(f"the registry of {base} cannot be reached")
    name = f"weighin-test-dockerfile:{os.getpid()}"
    built = docker("build", "--tag", name, "--file", f"{ROOT}/docker/Dockerfile", str(ROOT))
    assert built.returncode == 0, built.stderr
    try:
        ended = docker("run", "--rm", name, "predict", "gpt2-tiny")
        assert (ended.returncode, "gpt2-tiny" in ended.stdout) == (0, True), ended.stderr
    finally:
        docker("image", "rm", name)
