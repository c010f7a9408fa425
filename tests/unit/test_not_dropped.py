"""Pages that stay in the page cache are counted once for all files, and never called cold."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from factories import make_cell, make_result

from weighin.probes import page_cache
from weighin.report import captions
from weighin.report.rows import series
from weighin.report.tables import markdown_table


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_files_that_keep_their_pages_are_tried_again_together(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmpfs / str(number) for number in range(60)]
    for file in files:
        file.write_bytes(bytes(4096))
    pauses: list[float] = []
    sleep = time.sleep

    def count_and_sleep(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", count_and_sleep)
    assert page_cache.drop(files) == 60 * os.sysconf("SC_PAGESIZE")
    assert len(pauses) <= 20


def test_a_checkpoint_that_stays_in_the_page_cache_is_not_called_cold() -> None:
    cold = make_result(make_cell(repeat=0))
    kept = make_result(make_cell(repeat=1), cached_bytes_at_start=4096)
    assert [row["cache"] for row in series([cold])] == ["cold"]
    assert [row["cache"] for row in series([cold, kept])] == ["not dropped"]
    assert "cold page cache" in captions.shared(series([cold]), [cold])
    text = markdown_table([cold, kept])
    assert "checkpoint in the page cache" in text
    assert "cold" not in text
