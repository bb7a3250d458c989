"""Data sets and how they are divided among clients."""

from fedprior.data.federated import FederatedData
from fedprior.data.partition import dirichlet

__all__ = ["FederatedData", "dirichlet"]
