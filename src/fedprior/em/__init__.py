"""Hard EM: the E-step at a client, the M-step at the server.

Neither knows which algorithm it runs. The E-step works on one client or, vectorised, on a cohort, where every argument
has a leading client dimension. Both draw the same random numbers. `protocol` defines a round.
"""

from fedprior.em.algorithm import Algorithm
from fedprior.em.batch import Batch, Batches
from fedprior.em.estep import EStep, Tamper, e_step, local_objective
from fedprior.em.mstep import m_step
from fedprior.em.statistics import Statistics

__all__ = ["Algorithm", "Batch", "Batches", "EStep", "Statistics", "Tamper", "e_step", "local_objective", "m_step"]
