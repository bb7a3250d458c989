"""Data sets, and how to divide them among clients."""

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
