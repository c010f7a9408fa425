"""The report of a published run, made from its records by ``weighin report``'s own code."""

import tempfile
from pathlib import Path
from shutil import copytree
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from weighin.records import run_folder
from weighin.records.series import Measured
from weighin.show.write import write

RUN: Final = Path(__file__).parents[2] / "results/published/gpt2-xl-8GiB"
PAGE: Final = "example/report.html"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add report.html and its records. The run is copied first: a build leaves nothing in the repository."""
    with tempfile.TemporaryDirectory() as folder:
        run = copytree(RUN, Path(folder) / RUN.name)
        (report,) = write(Measured.of(run, run_folder.read(run)), ["html"])
        files.append(File.generated(config, PAGE, content=report.read_bytes()))
        records = (run / "records.jsonl").read_bytes()  # the page links to them
        files.append(File.generated(config, "example/records.jsonl", content=records))
    return files
