"""Write what a benchmark measured into a page, whose text is written by hand.

A block of the page is the text between two comments, the first of which names the benchmark::

    <!-- benchmarks/self_bench.py samplers -->
    ...
    <!-- end -->
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from weighin.show.words import plain
from weighin.text import markdown


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


def by_reason(reasons: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a list item for each reason, with all names whose reason differs in the name alone."""
    groups: dict[str, dict[str, None]] = {}
    for name, reason in reasons:
        shared = reason.removeprefix(f"{name} ").replace(f" and {name} ", " and ")
        groups.setdefault(shared, {})[name] = None
    for shared, names in groups.items():
        yield f"* {markdown(', '.join(names))}: {markdown(plain(shared))}"
