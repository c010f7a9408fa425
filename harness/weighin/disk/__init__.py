"""Make a disk slower than it is: a rate and a latency for the reads of a cell's checkpoint."""
