"""Kernels for a vectorised cohort on a GPU: one weight set a client, where torch's grouped ones are slow.

They are faster ways of operations of `core`, `units` and `priors`, with which `registration.py` registers them when an
engine is given a GPU (`engines/devices.py`). No other module imports this package.
"""

from fedprior.kernels.mode import BatchedKernels, available

__all__ = ["BatchedKernels", "available"]
