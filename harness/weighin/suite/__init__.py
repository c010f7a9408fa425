"""Read suites from YAML, find strategies and models by name, and plan the measurements (cells)."""
