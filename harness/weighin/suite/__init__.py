"""Read suites from YAML, find strategies and models by name, and expand a matrix into cells."""
