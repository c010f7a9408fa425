"""Construct models without writing their weights, and find out which tensors share memory."""
