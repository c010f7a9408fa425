"""The command line of weighin, with one module for each verb, such as ``weighin bench``. No other
package of weighin prints text or exits.
"""
