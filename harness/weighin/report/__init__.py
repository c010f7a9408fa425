"""Write the report of a run: report.html, report.md, summary.csv, peaks.png and timeline.png.

``report`` reads only the folder of the run. ``report`` is the only package of weighin that imports
matplotlib, to draw a picture, and pandas, to write cells.parquet; other reports need neither.
"""
