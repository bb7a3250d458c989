"""A federated algorithm is a prior over client parameters: one file a prior."""

from fedprior.priors.base import Prior
from fedprior.priors.budgeted import Budgeted
from fedprior.priors.fixed_gates import FixedGates
from fedprior.priors.gaussian import Gaussian
from fedprior.priors.group_lasso import GroupLasso
from fedprior.priors.laplace import Laplace
from fedprior.priors.mixture import Mixture
from fedprior.priors.spike_slab import SpikeSlab

__all__ = ["Budgeted", "FixedGates", "Gaussian", "GroupLasso", "Laplace", "Mixture", "Prior", "SpikeSlab"]
