"""Parse a large JSON file at once."""

import json
import sys
from pathlib import Path


def read_rows(path: str) -> list[dict[str, object]]:
    with Path(path).open() as file:
        rows: list[dict[str, object]] = json.load(file)  # TAKEN
    return rows


def main() -> None:
    rows = read_rows(sys.argv[1])  # CALLED
    print(sum(len(row) for row in rows))


main()
