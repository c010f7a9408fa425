"""What runs inside the measured process. Imports the vocabulary, torch and one strategy file.

Nobody but the isolations imports from here, and they only ``protocol``.
"""
