"""One run: its cells in order, each worker supervised."""
