"""Divide the cells of a plan among several runs, each of which measures one shard."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from weighin.errors import ConfigError

_Cell = TypeVar("_Cell")


@dataclass(frozen=True, slots=True)
class Shard:
    """Every ``count``-th cell of a plan, beginning with the cell number ``index``, counted from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, cells: Sequence[_Cell]) -> Sequence[_Cell]:
        return cells[self.index - 1 :: self.count]


def parse(text: str) -> Shard:
    """Return the shard in the text of --shard, such as "2/8".

    Raises:
        ConfigError: the text is not a shard.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match and 1 <= int(match[1]) <= int(match[2]):
        return Shard(int(match[1]), int(match[2]))
    raise ConfigError(
        f"--shard: cannot read {text!r}",
        "write the shard's number, from 1, and the number of shards: --shard 2/8",
        option="--shard",
    )
