"""The module that ``heavy_import.py`` imports: 600 MiB of numbers."""

SQUARES = [float(number * number) for number in range(20_000_000)]  # TAKEN
