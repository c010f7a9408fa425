"""The command line, with one module per verb. Only this package prints or exits."""
