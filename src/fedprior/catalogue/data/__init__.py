"""Data sets and how they are divided among clients."""

from fedprior.catalogue.data.partition import by_writer, dirichlet, pachinko, single_class
from fedprior.catalogue.data.schemes import PARTITIONS, clients_from, divide

__all__ = [
    "PARTITIONS",
    "by_writer",
    "clients_from",
    "dirichlet",
    "divide",
    "pachinko",
    "single_class",
]
