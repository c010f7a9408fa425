"""The child of ``large_child.py``: read 600 MiB of rows."""

rows = [bytes([number]) * 8 * 1024**2 for number in range(75)]  # TAKEN
print(len(rows))
