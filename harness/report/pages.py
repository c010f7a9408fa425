"""Puts published results into our own pages: ``python -m harness.report.pages README.md``.

A page holds blocks; what stands between their two lines is written here, from the records alone::

    <!-- results/published/gpt2-xl-8GiB -->
    ...
    <!-- end -->
"""

import re
import sys
from pathlib import Path
from typing import Final

from harness import journal
from harness.report.tables import markdown_table

_BLOCK: Final = re.compile(r"<!-- (?P<run>results/published/\S+) -->\n.*?<!-- end -->", re.DOTALL)


def fill(page: str, root: Path) -> str:
    """Return the page with every block filled from the run that it names, below ``root``.

    Raises:
        RecordError: a run that a block names is not there, or is damaged.
    """

    def block(match: re.Match[str]) -> str:
        results = journal.read(root / match["run"]).results
        return f"<!-- {match['run']} -->\n{markdown_table(results)}\n<!-- end -->"

    return _BLOCK.sub(block, page)


def main() -> None:
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(fill(page.read_text(), Path.cwd()))


if __name__ == "__main__":
    main()
