"""Real loads: a regression that the gate catches, a checkpoint that its strategy changes, compiled code."""

from importlib.util import cache_from_source
from pathlib import Path

import pytest
from nightly import nightly
from typed import ROOT, CommandLine

from weighin.suite.registry import data_folder

PLANTED = """

_planted_load = load


def load(job):
    kept = torch.ones({size_bytes} if {at_start} else 0, dtype=torch.uint8)
    model = _planted_load(job)
    model.__dict__["kept"] = kept if {at_start} else torch.ones({size_bytes}, dtype=torch.uint8)
    return model
"""
SIZE_BYTES = 702480384 // 20  # of gpt2-small


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["streaming", *nightly("baseline")])
def test_an_extra_tensor_of_5_percent_is_caught_by_the_gate_and_an_unchanged_run_passes(
    command: CommandLine, strategy: str
) -> None:
    def checked(run: str, strategy: str, more: str = "") -> tuple[int, str]:
        bench = f"bench gpt2-small --isolation process -s {strategy} --out {run}"
        assert (ended := command.run(bench)).code == 0, ended.err
        # Times are those of a busy machine; memory is the question.
        metrics = "peak_rss,above_import,anon,ready_anon"
        ended = command.run(f"check {run} --baseline b.yaml --metrics {metrics} {more}")
        return ended.code, ended.out

    assert checked("good", strategy, "--update")[0] == 0
    assert checked("again", strategy)[0] == 0
    text = (data_folder("strategies") / f"{strategy}.py").read_text()
    for at_start in (True, False):
        (folder := command.folder / str(at_start)).mkdir()
        planted = PLANTED.format(at_start=at_start, size_bytes=SIZE_BYTES)
        (folder / f"{strategy}.py").write_text(text + planted)
        code, out = checked(f"planted-{at_start}", f"{at_start}/{strategy}.py")
        assert (code, "ready_anon" in out) == (1, True), out


MAPS_SHARED = '''"""Map the checkpoint shared and writable, and change a byte in place."""
import mmap
import torch
from weighin.strategy import Load
FORMATS = ("pt",)
def load(job: Load) -> torch.nn.Module:
    with job.phase("change"), job.checkpoint.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0) as mapped:
            mapped[100_000] ^= 1
    model = job.build_model()
    model.load_state_dict(torch.load(job.checkpoint, weights_only=True))
    return model
'''
# Without this capability root cannot mount, and with all others mode bits do not stop it.
UNABLE_TO_MOUNT = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")


@pytest.mark.root
def test_only_the_strategy_that_changes_the_checkpoint_fails(command: CommandLine) -> None:
    (command.folder / "mine.py").write_text(MAPS_SHARED)
    bench = "bench gpt2-tiny --isolation process --use none --out run -s ./mine.py,baseline"
    assert command.run(bench, before=UNABLE_TO_MOUNT).left == []
    mine, baseline = command.records("run")
    assert (mine["outcome"], baseline["outcome"]) == ("strategy_failed", "ok")
    who = "the strategy changed the checkpoint's files during the measurement: model.pt; it ended with "
    assert mine["message"].startswith(who)


def test_a_run_leaves_bytecode_also_where_python_leaves_none(command: CommandLine) -> None:
    """No worker compiles our code on a strategy's clock."""
    compiled = Path(
        cache_from_source(str(ROOT / "harness" / "weighin" / "stream" / "load_streaming.py"))
    )
    compiled.unlink(missing_ok=True)
    bench = "bench gpt2-tiny -s baseline --isolation process"
    ended = command.run(bench, PYTHONDONTWRITEBYTECODE="1")
    assert (ended.code, ended.left) == (0, [])
    assert compiled.is_file()
