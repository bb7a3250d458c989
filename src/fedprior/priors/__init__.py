"""A federated algorithm is a prior over client parameters: one file a prior."""

from fedprior.priors.base import Prior
from fedprior.priors.gaussian import Gaussian
from fedprior.priors.spike_slab import SpikeSlab

__all__ = ["Gaussian", "Prior", "SpikeSlab"]
