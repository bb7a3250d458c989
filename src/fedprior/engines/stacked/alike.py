"""What runs must have in common to be stacked: all of them train with the first one's settings."""

from typing import Any

import torch

from fedprior.core.errors import SettingError
from fedprior.core.federated import FederatedData
from fedprior.engines.loop.round import Simulation


def check_alike(runs: list[Simulation]) -> None:
    """Refuse runs that differ in more than seeds, weights, the clients' rows, and scalar settings of the prior."""
    first, constants = _shared(runs[0]), _constants(runs[0])
    for run in runs[1:]:
        mine, own = _shared(run), _constants(run)
        differing = [name for name in {**first, **mine} if first.get(name) != mine.get(name)]
        differing += [name for name, value in constants.items() if not torch.equal(value, own[name])]
        differing += [] if _same_examples(runs[0].data, run.data) else ["examples"]
        if differing:
            raise SettingError(
                f"runs that differ in {differing[0]} cannot be stacked: train them one by one, or set mode=in-turn"
            )


def _shared(run: Simulation) -> dict[str, Any]:
    """Everything that must be the same, by name."""
    algorithm, data, network = run.algorithm, run.data, run.network
    free = {f"prior_{name}" for name in algorithm.prior.scalars}
    return {
        **{name: value for name, value in vars(run.settings).items() if name != "seed"},
        "algorithm": algorithm.name,
        **{name: value for name, value in algorithm.made().items() if name not in free},
        "network": (repr(network.module), {name: value.shape for name, value in network.params().items()}),
        "loss": getattr(network.loss, "__qualname__", repr(network.loss)),
        "metrics": run.measures.names,
        "clients": data.clients,
        "rounds that they have had": run.round,
    }


def _same_examples(first: FederatedData, other: FederatedData) -> bool:
    """Whether the examples are equal. Copies count as equal: each task makes tensors of its labels anew."""
    every = [data.tensors() for data in (first, other)]
    if [part.shape for part in every[0]] != [part.shape for part in every[1]]:
        return False
    pairs = zip(*every, strict=True)
    return all(a.data_ptr() == b.data_ptr() or torch.equal(a, b) for a, b in pairs)


def _constants(run: Simulation) -> dict[str, torch.Tensor]:
    """The parts of the network that are not trained, such as frozen layers or initial statistics."""
    trained, state = run.network.params(), run.network.module.state_dict()
    return {name: value for name, value in state.items() if name not in trained}
