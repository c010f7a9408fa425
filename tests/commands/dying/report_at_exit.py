"""Keep little while the program runs, and make a large report in an exit hook."""

import atexit


class Report:
    def __init__(self) -> None:
        self.steps = 0

    def write(self) -> None:
        lines = []
        for step in range(self.steps):
            text = f"step {step:012d}: loss {step / 3:.12f}, rate {step / 7:.12f}"  # TAKEN
            lines.append(text)  # TAKEN
        print(len("\n".join(lines)))  # TAKEN


report = Report()
atexit.register(report.write)
while report.steps < 2_500_000:
    report.steps += 1
