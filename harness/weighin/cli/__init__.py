"""The command line of weighin, with one module for each verb. Only the package weighin.cli prints
or exits.
"""
