"""Load a checkpoint straight into a model: weighin's own loader, measured like any other strategy."""
