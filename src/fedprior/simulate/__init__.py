"""The simulator: many clients on one machine, every message encoded and counted."""

from fedprior.simulate.folder import RunFolder
from fedprior.simulate.round import Simulation, simulation
from fedprior.simulate.run import Result, Settings

__all__ = ["Result", "RunFolder", "Settings", "Simulation", "simulation"]
