"""Write what a benchmark measured into a page, whose text is written by hand.

A block of the page is the text between two comments, the first of which names the benchmark::

    <!-- benchmarks/self_bench.py samplers -->
    ...
    <!-- end -->
"""

import re
from collections.abc import Mapping


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """Return the page with these blocks filled; ``blocks`` has each text by its comment.

    Raises:
        ValueError: the page lacks a block.
    """
    for name, text in blocks.items():
        block = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?<!-- end -->", re.DOTALL)
        found = block.search(page)
        if found is None:
            raise ValueError(f"the page has no block <!-- {name} -->")
        page = f"{page[: found.end(1)]}{text}\n<!-- end -->{page[found.end() :]}"
    return page
