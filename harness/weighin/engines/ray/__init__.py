"""Run cells on the nodes of a Ray cluster. Only these modules import ray, and only for --engine ray."""
