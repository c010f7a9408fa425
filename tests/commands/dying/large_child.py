"""Start another program, which takes all the memory; this one stays small."""

import subprocess
import sys
from pathlib import Path

worker = Path(__file__).parent / "parts" / "worker.py"
subprocess.run([sys.executable, str(worker)], check=True)  # CALLED
