"""A federated algorithm is a prior over client parameters. There is one file per prior."""

from fedprior.priors.base import Assignment, Prior
from fedprior.priors.bernoulli_mask import BernoulliMask
from fedprior.priors.distance import Distance
from fedprior.priors.fixed_gates import FixedGates
from fedprior.priors.gaussian import Gaussian
from fedprior.priors.group_lasso import GroupLasso
from fedprior.priors.laplace import Laplace
from fedprior.priors.mixture import Mixture
from fedprior.priors.narrow import Narrow
from fedprior.priors.products import Products
from fedprior.priors.sized import Sized
from fedprior.priors.spike_slab import SpikeSlab
from fedprior.priors.student_t import StudentT

__all__ = [
    "Assignment",
    "BernoulliMask",
    "Distance",
    "FixedGates",
    "Gaussian",
    "GroupLasso",
    "Laplace",
    "Mixture",
    "Narrow",
    "Prior",
    "Products",
    "Sized",
    "SpikeSlab",
    "StudentT",
]
