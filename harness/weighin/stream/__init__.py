"""Find the tensors of a checkpoint in its files, without running the files' code or reading values."""
