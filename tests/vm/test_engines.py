"""Containers on cgroup v2: Docker as root, with users remapped and as an ordinary user; and Podman."""

import pytest
from machine import ENGINES, Ended
from test_cgroup_v2 import SPENT, records

from weighin.units import MIB

pytestmark = [pytest.mark.vm, pytest.mark.nightly]


@pytest.mark.parametrize("engine", ENGINES[:-1])
def test_a_container_has_its_limit_and_its_figures(engines: Ended, engine: str) -> None:
    print(engines.out(engine), (engines.folder / engine / "doctor.txt").read_text())
    assert engines.status(engine) == 0, engines.console
    (fits,) = records(engines, f"{engine}/fits")
    assert (fits["outcome"], fits["environment"]["cgroup_version"]) == ("ok", 2)
    assert fits["peaks"]["cgroup_bytes"] == pytest.approx(SPENT, abs=0.01 * SPENT + MIB)
    (killed,) = records(engines, f"{engine}/killed")
    assert (killed["outcome"], killed["oom_kills"]) == ("oom_killed", 1)
    (load,) = records(engines, f"{engine}/load")
    assert load["outcome"] == "ok"


def test_podman_is_passed_with_its_reason(engines: Ended) -> None:
    (record,) = records(engines, "podman")
    assert (record["outcome"], record["cell"]["isolation"]) == ("ok", "cgroup")
    said = (engines.folder / "podman.err").read_text()
    assert "isolation cgroup: the engine cannot limit a container that runs (Podman 4.3" in said
