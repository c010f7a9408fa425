"""Our own loader: a checkpoint straight into a model. A contestant like any other."""
