"""Kernels for a vectorised cohort on a GPU: one weight set per client, where torch's grouped kernels are slow.

They are faster versions of operations in `core`, `units` and `priors`. `registration.py` registers them there when an
engine is given a GPU (`engines/devices.py`). No other module imports this package.
"""

from fedprior.kernels.mode import BatchedKernels, available

__all__ = ["BatchedKernels", "available"]
