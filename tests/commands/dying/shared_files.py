"""Write 512 MiB of files to /dev/shm: shared memory, which stays until the files are removed."""

import sys
from pathlib import Path

folder = Path(sys.argv[1])
part = b"x" * 32 * 1024**2
for number in range(16):
    (folder / f"part{number}").write_bytes(part)  # TAKEN
print("written")
