"""The pytest plugin: measure loads, functions and the bodies of tests in fresh workers."""
