"""Mistakes in a prior of one's own, each of which gets one line that says what to do."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import fedprior
from fedprior.core.errors import SettingError
from fedprior.core.trees import Tree
from fedprior.corrections import Scaffold
from fedprior.priors import Assignment, Gaussian, Prior

SGD = {"weights": fedprior.Optimiser("SGD", {"lr": 0.05})}


@dataclass(frozen=True)
class Mistaken(Prior):
    """The Gaussian of FedAvg, with one mistake."""

    mistake: str = ""
    scalars = ()

    def density(self, assignment: Assignment, server: Tree) -> Tensor:
        apart = [(assignment.weights[k] - w).square().flatten() for k, w in server["weights"].items()]
        value = -torch.cat(apart).sum()
        return {"a vector": value.expand(3), "a float": 0.0}.get(self.mistake, value)

    def temper(self):
        return {"dens" if self.mistake == "temper" else "density": 1.0}

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        means = {name: value.mean(0) for name, value in assignments.weights.items()}
        first = next(iter(means))
        if self.mistake == "forgets":
            del means[first]
        if self.mistake == "invents":
            means["new"] = torch.ones(3)
        if self.mistake == "does not average":
            means[first] = assignments.weights[first]
        if self.mistake == "nothing":
            return None
        return means if self.mistake == "the weights alone" else {**server, "weights": means}


class Told(Mistaken):
    told = ("weights", "momentum")


class Scaled(Mistaken):
    scalars = ("presicion",)


def test_without_a_mistake_it_learns(small_task):
    result = fedprior.run(small_task(), fedprior.Algorithm(Mistaken(), SGD), rounds=3, clients_per_round=3)
    losses = [record["train_loss"] for record in result.records]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("mode", ["in-turn", "vectorised"])
@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (
            Mistaken("a vector"),
            r"the term 'density' of Mistaken must be a tensor of one number, got one of shape \(3,\)",
        ),
        (Mistaken("a float"), "the term 'density' of Mistaken must be a tensor of one number, got a float"),
        (Mistaken("temper"), "Mistaken tempers dens, but its terms are density"),
        (
            Mistaken("forgets"),
            r"Mistaken.solve must return every weight of the server .* it does not for conv.weight$",
        ),
        (Mistaken("invents"), r"Mistaken.solve must return every weight .* it does not for new$"),
        (Mistaken("does not average"), r"Mistaken.solve must return every weight .* it does not for conv.weight$"),
        (Mistaken("nothing"), "Mistaken.solve must return the server's whole state"),
        (Mistaken("the weights alone"), "Mistaken.solve must return the server's whole state"),
        (Told(), r"Told tells its clients momentum \(`told`\), but its server has only weights"),
        (Scaled(), "Scaled names 'presicion' among its scalars, but has no such field"),
    ],
)
def test_a_mistake_in_a_prior_is_one_line(small_task, prior, message, mode):
    with pytest.raises(SettingError, match=message):
        fedprior.run(small_task(), fedprior.Algorithm(prior, SGD), rounds=2, clients_per_round=3, mode=mode)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"local": SGD["weights"]}, r"local must be one fedprior.Optimiser for each .*, got an Optimiser$"),
        ({"local": {"weights": torch.optim.SGD}}, "local must be one fedprior.Optimiser for each section"),
        ({"local": SGD, "server": SGD["weights"]}, "server must be one fedprior.Optimiser for each section"),
        ({"local": SGD, "correction": Scaffold}, "correction must be a Correction, got the class Scaffold"),
        ({"local": SGD, "prior": Gaussian}, "prior must be a Prior, got the class Gaussian"),
    ],
)
def test_a_part_of_the_wrong_kind_is_refused_at_once(parts, message):
    with pytest.raises(SettingError, match=message):
        fedprior.Algorithm(**{"prior": Gaussian(), **parts})


def test_an_optimiser_for_variables_that_are_not_there_is_one_line(small_task):
    with pytest.raises(SettingError, match="there is an optimiser for 'weigths', but the variables are weights"):
        fedprior.run(small_task(), fedprior.Algorithm(Gaussian(), {"weigths": SGD["weights"]}), rounds=1)
    with pytest.raises(SettingError, match=r"an optimiser is named, .* got the class SGD"):
        fedprior.Optimiser(torch.optim.SGD, {"lr": 0.1})
