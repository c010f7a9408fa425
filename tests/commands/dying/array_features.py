"""Read an array of float32 features, and make float64 of it."""

import sys

import numpy as np

features = np.load(sys.argv[1])  # TAKEN: a whole file
exact = features.astype(np.float64)  # TAKEN
print(exact.sum())
