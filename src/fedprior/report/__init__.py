"""Tables from records. Sees only what a run left on disk."""

from fedprior.report.table import markdown_table, summary_table

__all__ = ["markdown_table", "summary_table"]
