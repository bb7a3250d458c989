"""Corrections of the local gradient or of the upload. They compose with any prior."""

from fedprior.corrections.base import Correction
from fedprior.corrections.scaffold import Scaffold
from fedprior.corrections.top_k import TopK

__all__ = ["Correction", "Scaffold", "TopK"]
