"""The physically smaller network that a run leaves, and files of it that need no fedprior."""

from fedprior.compact.shrink import Compact, compact
from fedprior.compact.write import export_module, load_module

__all__ = ["Compact", "compact", "export_module", "load_module"]
