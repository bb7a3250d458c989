"""Tables and figures from records. This package sees only what a run left on disk."""

from fedprior.report.reading import Partition
from fedprior.report.records import Broken, Curve, Estimate, Found, Group, Run, find_runs, group_runs, read_run
from fedprior.report.run_tables import markdown_table, summary_table
from fedprior.report.table import Table

__all__ = [
    "Broken",
    "Curve",
    "Estimate",
    "Found",
    "Group",
    "Partition",
    "Run",
    "Table",
    "find_runs",
    "group_runs",
    "markdown_table",
    "read_run",
    "summary_table",
]
