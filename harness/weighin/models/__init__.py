"""Models to load: builders, and building them without paying for their weights."""
