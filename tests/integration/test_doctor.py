"""``weighin doctor`` on this machine: a limit is tried by running into it."""

import json

import pytest
from typed import CommandLine


@pytest.mark.slow
@pytest.mark.cgroup
def test_a_limit_is_proven_by_a_probe_that_is_killed(command: CommandLine) -> None:
    ended = command.run("doctor --json -", DOCKER_HOST="unix:///nonexistent")
    document = json.loads(ended.out)
    verdicts = {one["subject"]: (one["verdict"], one["detail"]) for one in document["capabilities"]}
    assert verdicts["isolation docker"] == (
        "no",
        "no Docker engine answers at unix:///nonexistent: No such file or directory. sudo systemctl"
        " start docker, or set DOCKER_HOST; for permission: sudo usermod -aG docker $USER, and log in again",
    )
    works, detail = verdicts["isolation cgroup enforces a limit"]
    assert works == "yes"
    assert detail.startswith(
        "a probe that allocated more than 384.000 MiB was killed, cgroup peak "
    )
    assert verdicts["isolation process"] == ("yes", "measures; enforces no limit")
    assert (document["holds_a_limit"], ended.code, ended.left) == (True, 0, [])
    assert ended.err == ""
    assert verdicts["slow disks (--disk, disk_latency)"][0] == "yes"
