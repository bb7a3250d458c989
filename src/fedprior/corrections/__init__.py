"""Corrections of the local gradient. They are orthogonal to the prior and compose with each of them."""

from fedprior.corrections.base import Correction
from fedprior.corrections.scaffold import Scaffold

__all__ = ["Correction", "Scaffold"]
