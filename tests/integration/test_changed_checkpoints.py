"""A strategy that writes to its checkpoint is named, and no other strategy gets a wrong verdict."""

import pytest
from typed import CommandLine

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
BENCH = ("bench", "gpt2-tiny", "--isolation", "process", "--use", "none", "--out", "run")
# Without this capability root cannot mount, and with all others mode bits do not stop it.
UNABLE_TO_MOUNT = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")


@pytest.mark.root
def test_only_the_strategy_that_changes_the_checkpoint_fails(command: CommandLine) -> None:
    (command.folder / "mine.py").write_text(MAPS_SHARED)
    ended = command.run(*BENCH, "-s", "./mine.py,baseline", before=UNABLE_TO_MOUNT)
    assert ended.left == []
    mine, baseline = command.records("run")
    assert (mine["outcome"], baseline["outcome"]) == ("strategy_failed", "ok")
    who = "the strategy changed the checkpoint's files during the measurement: model.pt; it ended with "
    assert mine["message"].startswith(who)
