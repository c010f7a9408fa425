"""What the pytest plugin does once a test uses it: loads, functions and tests' own bodies, measured."""
