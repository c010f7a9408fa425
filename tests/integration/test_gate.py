"""The gate on real loads: one extra tensor of 5 % of the model is caught, an unchanged run passes."""

from pathlib import Path

import pytest
from nightly import nightly
from typed import CommandLine

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
def test_an_extra_tensor_is_caught_and_an_unchanged_run_passes(
    tmp_path: Path, disk: Path, strategy: str
) -> None:
    weighin = CommandLine(tmp_path, disk / "cache")

    def measured(run: str, path: str) -> str:
        ended = weighin.run(
            "bench", "gpt2-small", "--isolation", "process", "--strategies", path, "--out", run
        )
        assert ended.code == 0, ended.err
        return run

    def checked(run: str, *more: str) -> tuple[int, str]:
        # Times are those of a busy machine; memory is the question.
        metrics = "peak_rss,above_import,anon,ready_anon"
        ended = weighin.run("check", run, "--baseline", "b.yaml", "--metrics", metrics, *more)
        return ended.code, ended.out

    assert checked(measured("good", strategy), "--update")[0] == 0
    assert checked(measured("again", strategy))[0] == 0
    text = (data_folder("strategies") / f"{strategy}.py").read_text()
    for at_start in (True, False):
        folder = tmp_path / str(at_start)
        folder.mkdir()
        path = folder / f"{strategy}.py"
        path.write_text(text + PLANTED.format(at_start=at_start, size_bytes=SIZE_BYTES))
        code, out = checked(measured(f"planted-{at_start}", str(path)))
        assert code == 1, out
        assert "ready_anon" in out
