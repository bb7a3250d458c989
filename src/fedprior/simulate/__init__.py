"""The simulator: many clients on one machine, every message encoded and counted."""

from fedprior.simulate.early import STOP
from fedprior.simulate.folder import RunFolder
from fedprior.simulate.round import Simulation, simulation
from fedprior.simulate.run import Result, Settings

__all__ = ["STOP", "Result", "RunFolder", "Settings", "Simulation", "simulation"]
