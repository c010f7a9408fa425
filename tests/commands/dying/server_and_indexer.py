"""A server with a steady cache starts an indexer, which grows until the kernel kills the larger one: the server."""

import subprocess
import sys
from pathlib import Path

cache = [bytes([number]) * 1024**2 for number in range(200)]  # TAKEN: growth or none
indexer = Path(__file__).parent / "parts" / "indexer.py"
subprocess.run([sys.executable, str(indexer)], check=True)  # CALLED
print(len(cache))
