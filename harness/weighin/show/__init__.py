"""Show what was measured: as tables and sentences in the terminal, report.md and report.html."""
