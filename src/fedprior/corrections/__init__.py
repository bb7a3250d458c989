"""Corrections of the local gradient. They are independent of the prior and compose with any of them."""

from fedprior.corrections.base import Correction
from fedprior.corrections.scaffold import Scaffold

__all__ = ["Correction", "Scaffold"]
