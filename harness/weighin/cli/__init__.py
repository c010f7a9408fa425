"""The command line of weighin, with one module for each verb. Only this package prints or exits."""
