"""Measure the memory of conversions from one file to each format, and compare it with a limit.

Each conversion runs in a fresh process and is verified at its end. Its figure is the sampled
maximum of anonymous memory (1000 samples per second) minus the memory after all imports. The limit
is the size of the largest tensor plus 300 MiB. The script exits with 1 if a conversion exceeds the
limit.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from weighin.checkpoint import cache, staging
from weighin.settings.definition import DTYPES
from weighin.stream import formats
from weighin.suite import registry
from weighin.units import GIB, MIB

SPARE_BYTES = 300 * MIB
CHILD = """
import json, sys, threading, time
from pathlib import Path
import torch
from weighin.checkpoint.convert import Conversion
from weighin.probes.process import memory_of, read_status

def anonymous():
    return memory_of(read_status()).anon_bytes

before = peak = anonymous()
ended = threading.Event()

def watch():
    global peak
    while not ended.wait(0.001):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
source, target, fmt, dtype = sys.argv[1:]
seconds = Conversion(Path(source), Path(target), fmt, dtype, verify=True).write()
ended.set()
watcher.join()
print(json.dumps({"peak_bytes": peak - before, "write_s": seconds["seconds"]}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-xl")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="target dtype")
    parser.add_argument("--formats", nargs="+", choices=formats.NAMES, default=list(formats.NAMES))
    options = parser.parse_args()
    source = cache.ensure(registry.model(options.model), "pt")
    stored = [one for one in source.manifest().tensors if one.kind != "non_persistent_buffer"]
    limit = max(one.bytes for one in stored) + SPARE_BYTES
    size_bytes = sum(one.bytes for one in stored if one.shared_with is None)
    print(f"{options.model}: {size_bytes / GIB:.2f} GiB to {DTYPES[options.dtype]}")
    print(f"{'format':<14}{'above import MiB':>18}{'limit MiB':>12}{'write s':>10}")
    failed = False
    for fmt in options.formats:
        measured = convert(source.path, fmt, DTYPES[options.dtype])
        failed |= measured["peak_bytes"] > limit
        peak, seconds = measured["peak_bytes"] / MIB, measured["write_s"]
        print(f"{fmt:<14}{peak:>18.1f}{limit / MIB:>12.1f}{seconds:>10.2f}", flush=True)
    sys.exit(failed)


def convert(source: Path, fmt: str, dtype: str) -> dict[str, float]:
    """Run one conversion; return its memory above the imports in bytes, and its seconds."""
    folder = Path(tempfile.mkdtemp(prefix="converting-", dir=staging.folder()))
    try:
        target = folder / f"model{formats.suffix_of(fmt)}"
        command = [sys.executable, "-c", CHILD, str(source), str(target), fmt, dtype]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        measured: dict[str, float] = json.loads(done.stdout)
        return measured
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
