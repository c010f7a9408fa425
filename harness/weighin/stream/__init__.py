"""Find the tensors of a checkpoint in its files, and load the models of libraries from them."""
