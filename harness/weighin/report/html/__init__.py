"""Build the parts of report.html, which a browser shows without a network or any other file."""
