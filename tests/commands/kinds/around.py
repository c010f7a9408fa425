"""Print what a command finds around it, as JSON: streams, folder, environment, signals, files."""

import json
import os
import sys
from pathlib import Path

status = Path("/proc/self/status").read_text().splitlines()
print(
    json.dumps(
        {
            "terminals": [os.isatty(stream) for stream in range(3)],
            "folder": str(Path.cwd()),
            "environment": dict(sorted(os.environ.items())),
            "path": sys.path,
            "signals": [line for line in status if line.startswith(("SigBlk", "SigIgn"))],
            "umask": [line for line in status if line.startswith("Umask")],
            "descriptors": sorted(each.name for each in Path("/proc/self/fd").iterdir()),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        },
        indent=1,
    )
)
