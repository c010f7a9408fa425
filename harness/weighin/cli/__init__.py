"""The command line of weighin, with one module for each verb, such as ``weighin bench``. The other
packages return results or raise errors, and leave it to this package to print them.
"""
