"""Test what this machine can limit and measure."""
