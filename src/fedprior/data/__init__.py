"""Data sets and how they are divided among clients."""

from fedprior.data.federated import FederatedData
from fedprior.data.partition import by_writer, dirichlet, fingerprint, pachinko, single_class
from fedprior.data.schemes import PARTITIONS, clients_from, divide

__all__ = [
    "PARTITIONS",
    "FederatedData",
    "by_writer",
    "clients_from",
    "dirichlet",
    "divide",
    "fingerprint",
    "pachinko",
    "single_class",
]
