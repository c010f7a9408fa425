"""The parts of ``benchmarks/self_bench.py``: what weighin itself costs, and how true its figures are."""
