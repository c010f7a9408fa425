"""Construct models without writing their weights, and tell how their tensors share memory."""
