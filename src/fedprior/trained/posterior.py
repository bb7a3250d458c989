"""What the hierarchical model is unsure of, as an ensemble: draws from its prior, or its clients' hard assignments.

A draw from the prior is what a client would commit to that has no data. With gates these are drawn from θ, of a mixture
it is a component, of a Gaussian posterior every weight is drawn; a Gaussian with one centre draws the same network each
time, and is refused.
"""

import copy
from pathlib import Path

import torch

from fedprior.catalogue.tasks import Task
from fedprior.core import keys, trees
from fedprior.core.ensemble import Ensemble
from fedprior.core.errors import SettingError
from fedprior.core.keys import Purpose, Turn
from fedprior.core.network import Network
from fedprior.core.options import either
from fedprior.core.trees import Params
from fedprior.em import Algorithm, protocol
from fedprior.engines.loop.round import Simulation
from fedprior.engines.server_state import with_values
from fedprior.runs.drive import Result
from fedprior.trained.elsewhere import task_of
from fedprior.trained.export import personal_model, simulation_of, source_of

SOURCES = ("prior", "clients")


def posterior(
    run: Result | Path | str,
    *,
    samples: int = 16,
    of: str = "prior",
    task: Task | None = None,
    network: Network | None = None,
    algorithm: Algorithm | None = None,
) -> Ensemble:
    """A run's uncertainty as an ensemble, whose outputs are the logarithm of its members' mean probabilities.

    With `of="prior"`, the members are draws from the prior: networks with gates drawn from θ, or the components of a
    mixture, all of them. With `of="clients"`, they are the hard assignments that so many clients would commit to.
    """
    if of not in SOURCES:
        raise SettingError(f"of must be {either(SOURCES)}, got {of!r}")
    about, sim = simulation_of(run, task_of(run, task, network), algorithm, "posterior")
    if not isinstance(samples, int) or samples < 1:
        raise SettingError(f"samples must be a whole number of at least 1, got {samples!r}")
    if of == "clients" and samples > sim.data.clients:
        raise SettingError(f"samples must be at most {sim.data.clients}, the number of clients, got {samples}")
    if of == "clients":
        chosen = keys.choose(keys.fold(sim.root, Purpose.POSTERIOR), sim.data.clients, samples)
        members = [personal_model(sim, client) for client in chosen]
    else:
        members = [with_values(copy.deepcopy(sim.network.module), one) for one in _draws(sim, samples)]
    source = source_of(run, about, sim.round)
    return Ensemble([member.cpu() for member in members], sim.measures.class_dim, source).eval()


def _draws(sim: Simulation, samples: int) -> list[Params]:
    """So many draws from the prior, or all components if the server has several models."""
    server = sim.algorithm.prior.prune(sim.server)
    shipped = sim.algorithm.ship(server)
    several = len(next(iter(shipped.values())))
    if several > 1:
        return [trees.row(shipped, k) for k in range(several)]
    server = sim.algorithm.shipped(server)  # draws are around what is shipped, also where that is an average
    key = Turn(sim.root, sim.round + 1).key(Purpose.POSTERIOR)
    drawn = [protocol.imagine(sim.algorithm, server, keys.fold(key, number)) for number in range(samples)]
    if samples > 1 and all(torch.equal(one[name], drawn[0][name]) for one in drawn for name in one):
        raise SettingError(
            f"{_named(sim.algorithm)} draws the same network each time, so its prior is sure of it: use of='clients'"
        )
    own = {name: value[0] for name, value in shipped.items()}
    return [{**own, **one} for one in drawn]


def _named(algorithm: Algorithm) -> str:
    """What a user calls an algorithm: its name or, if it is their own, their prior's."""
    return type(algorithm.prior).__name__ if algorithm.name == "own" else algorithm.name
