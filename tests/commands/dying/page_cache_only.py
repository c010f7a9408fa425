"""Read a file of twice the limit, and keep nothing of it: page cache, which is no need."""

import sys
from pathlib import Path

length = 0
with Path(sys.argv[1]).open("rb") as file:
    while piece := file.read(1024**2):
        length += len(piece)
print(length)
