"""Read a whole checkpoint into one ``bytes``, before anything is made of it."""

import sys
from pathlib import Path

with Path(sys.argv[1]).open("rb") as file:
    content = file.read()  # TAKEN
print(len(content))
