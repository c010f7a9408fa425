"""Run measurements (cells) on the nodes of a Ray cluster.

Only the modules of weighin.engines.ray import ray, and only for --engine ray.
"""
