"""Fork three workers that read a list of strings.

Each read counts a reference, which writes to the page of the string: so each worker copies them
all. The parent alone has about 130 MiB, and all together four times as much.
"""

import os


def work(samples: list[str]) -> int:
    return sum(len(sample) for sample in samples)  # TAKEN


samples = [f"sample {number:012d}" for number in range(1_600_000)]  # TAKEN: growth or none
for _ in range(3):
    if not os.fork():
        print(work(samples))  # CALLED
        os._exit(0)
for _ in range(3):
    os.wait()
