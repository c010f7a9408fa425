"""weighin: what loading a PyTorch checkpoint costs in memory and time, and which way of loading to use."""

__version__ = "0.1.0"
