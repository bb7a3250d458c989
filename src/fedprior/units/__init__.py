"""Which parameters form a unit, what dies with it downstream, and how large a pruned network therefore is."""

from fedprior.units.gating import Gating
from fedprior.units.structure import Layer, Reader, Structure
from fedprior.units.trace import find_structure
from fedprior.units.unit_gating import UnitGating
from fedprior.units.weight_gating import WeightGating

__all__ = ["Gating", "Layer", "Reader", "Structure", "UnitGating", "WeightGating", "find_structure"]
