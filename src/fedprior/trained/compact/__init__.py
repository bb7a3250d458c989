"""The physically smaller network that a run leaves, and files of it that need no fedprior."""

from fedprior.trained.compact.shrink import Compact, compact
from fedprior.trained.compact.write import export_module, load_module

__all__ = ["Compact", "compact", "export_module", "load_module"]
