"""The physically smaller network that a run produces, and its files, which can be used without fedprior."""

from fedprior.trained.compact.export_folder import export_module, load_module
from fedprior.trained.compact.shrink import Compact, compact

__all__ = ["Compact", "compact", "export_module", "load_module"]
