"""Build the parts of report.html, a single file that needs no other file."""
