"""The command line of weighin, one module for each verb; only this package prints."""
