"""Data sets and how they are divided among clients."""

from fedprior.data.federated import FederatedData
from fedprior.data.partition import by_writer, dirichlet, fingerprint, pachinko, single_class

__all__ = ["FederatedData", "by_writer", "dirichlet", "fingerprint", "pachinko", "single_class"]
