"""The command line: one module a verb; the only place that prints or exits."""
