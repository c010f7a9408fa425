"""Write the report of a run: report.html, report.md, summary.csv, peaks.png and timeline.png.

The package weighin.report reads nothing but the folder of the run. No other package of weighin
imports matplotlib, which draws the pictures, or pandas, which writes cells.parquet.
"""
