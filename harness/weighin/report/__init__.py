"""Write the report of a run: by default report.html, report.md, summary.csv and PNG pictures.

The package weighin.report reads nothing but the folders of runs. No other package of weighin
imports matplotlib, which draws the pictures, or pandas, which writes cells.parquet.
"""
