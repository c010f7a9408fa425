"""Each kind of harm that can be done to a checkpoint, in each layout where it can occur."""

from harms import archives, damage, headers, indexes, metadata, pickles
from harms.given import CASES, DATA, PLANS, Given, Harm

__all__ = [
    "CASES",
    "DATA",
    "PLANS",
    "Given",
    "Harm",
    "archives",
    "damage",
    "headers",
    "indexes",
    "metadata",
    "pickles",
]
