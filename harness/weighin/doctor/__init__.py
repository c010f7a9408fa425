"""What this machine can limit and measure."""
