"""Kernels for a vectorised cohort on a GPU: one weight set a client, where torch's grouped ones are slow."""

from fedprior.kernels.mode import BatchedKernels, available

__all__ = ["BatchedKernels", "available"]
