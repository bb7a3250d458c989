"""FedSparse against Algorithms 1 and 2 of the paper, written a second time from the paper, in plain loops.

The twin shares no code with the library but the random numbers: it keeps every weight, knows no columns, masks, wires
or vectors of gates, and steps with torch's own optimisers. Everything is in float64, because Adamax and T = 1e-3
amplify rounding. The library sends and keeps only the pruned network; the two must still give the same numbers.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedprior
from fedprior.core import keys
from fedprior.core.keys import Purpose, Turn
from fedprior.engines.batches import ClientBatches, Workload

T, KAPPA, START, EPSILON = 1e-3, 1e-4, 0.99, 0.1
LOCAL_LR = 0.05
GROUPS = {"conv": ("conv.weight", "conv.bias"), "fc1": ("fc1.weight", "fc1.bias")}


def network(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """tests/small_world's network, as a formula."""
    x = F.max_pool2d(torch.relu(F.conv2d(x, w["conv.weight"], w["conv.bias"])), 2).flatten(1)
    return torch.relu(x @ w["fc1.weight"].T + w["fc1.bias"]) @ w["fc2.weight"].T + w["fc2.bias"]


class Twin:
    """The server and its clients, unit by unit or weight by weight."""

    def __init__(self, task, server: str, by_unit: bool, follow: bool, relaxation: str) -> None:
        self.data, self.by_unit, self.follow = task.data, by_unit, follow
        # Louizos et al. (2018), eq. 12: with a location log α, P(z > 0) = σ(log α − β log(−γ / ζ)).
        self.active = -(2 / 3) * math.log(0.1 / 1.1)
        self.location = 0.0 if relaxation == "location" else -self.active
        # Such that units, or weights, go in several rounds.
        self.lambda0, self.local_lr, self.server_lr = (1e-4, 3e-3, 1e-2) if by_unit else (1e-4, 1e-3, 3e-2)
        self.w = {name: p.detach().clone() for name, p in task.network.module.named_parameters()}
        matrices = [name for name, value in self.w.items() if value.dim() > 1]
        self.groups = GROUPS if by_unit else {name: (name,) for name in matrices}
        tau = {group: self.norms(self.w, group) - T * math.log(START / (1 - START)) for group in self.groups}
        self.v = {group: t.clamp(min=1e-8).expm1().log() for group, t in tau.items()}
        kinds = {"mean": (torch.optim.SGD, 1.0), "adam": (torch.optim.Adam, 1e-3)}
        kind, lr = kinds[server]
        self.adam = kind(list(self.w.values()), lr=lr)
        self.adamax = torch.optim.Adamax(list(self.v.values()), lr=self.server_lr)
        self.gone = {group: torch.zeros_like(v, dtype=torch.bool) for group, v in self.v.items()}

    def norms(self, w: dict[str, Tensor], group: str) -> Tensor:
        """‖w_g‖: of a unit's weights, without its bias; of a weight, its magnitude."""
        weight = w[self.groups[group][0]].detach()
        return weight.flatten(1).square().sum(1).sqrt() if self.by_unit else weight.abs()

    def theta(self, w: dict[str, Tensor], v: dict[str, Tensor], group: str) -> Tensor:
        return torch.sigmoid((self.norms(w, group) - F.softplus(v[group])) / T)

    def gated(self, w: dict[str, Tensor], z: dict[str, Tensor]) -> dict[str, Tensor]:
        out = dict(w)
        for group, names in self.groups.items():
            for name in names:
                shape = z[group].shape if not self.by_unit else (-1, *[1] * (w[name].dim() - 1))
                out[name] = w[name] * z[group].reshape(shape)
        return out

    def draws(self, key: Tensor) -> dict[str, Tensor]:
        counts = [v.numel() for v in self.v.values()]
        pieces = keys.uniform(key, (sum(counts),), torch.float64).split(counts)
        return {group: u.reshape(self.v[group].shape) for group, u in zip(self.v, pieces, strict=True)}

    # ------------------------------------------------------------------ Algorithm 2
    def client(self, turn: Turn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        theta_logit = {g: (self.norms(self.w, g) - F.softplus(self.v[g])) / T for g in self.groups}
        w = {name: value.detach().clone().requires_grad_() for name, value in self.w.items()}
        v = {group: value.detach().clone().requires_grad_() for group, value in self.v.items()}
        sgd = torch.optim.SGD(list(w.values()), lr=LOCAL_LR)
        adamax = torch.optim.Adamax(list(v.values()), lr=self.local_lr)
        for step, batch in enumerate(ClientBatches(self.data, turn.client, Workload(4), turn.key(Purpose.BATCHES))):
            u = self.draws(keys.fold(turn.key(Purpose.RELAX), step))
            z, penalty = {}, torch.zeros((), dtype=torch.float64)
            for group, names in self.groups.items():
                logit = (self.norms(w, group) - F.softplus(v[group])) / T
                location, prior = logit + self.location, theta_logit[group] + self.location
                pi = torch.sigmoid(location + self.active) * ~self.gone[group]
                s = torch.sigmoid((u[group].logit() + location) / (2 / 3))
                z[group] = (s * 1.2 - 0.1).clamp(0, 1) * ~self.gone[group]
                size = sum(w[name].numel() for name in names) // v[group].numel() if self.by_unit else 1
                # L0, and z log θ + (1 − z) log(1 − θ) up to a constant
                penalty = penalty + (self.lambda0 * size * pi - KAPPA * pi * (prior + self.active)).sum()
            loss = F.cross_entropy(network(self.gated(w, z), batch.x), batch.y) + penalty
            sgd.zero_grad()
            adamax.zero_grad()
            loss.backward()
            sgd.step()
            adamax.step()
        u = self.draws(turn.key(Purpose.COMMIT))
        z = {g: ((u[g] < self.theta(w, v, g)) & ~self.gone[g]).double() for g in self.groups}
        return z, {name: value.detach() for name, value in self.gated(w, z).items()}

    # ------------------------------------------------------------------ Algorithm 1
    def prune(self) -> None:
        for group, names in self.groups.items():
            self.gone[group] |= self.theta(self.w, self.v, group) <= EPSILON
            for name in names:
                keep = (~self.gone[group]).double()
                shape = keep.shape if not self.by_unit else (-1, *[1] * (self.w[name].dim() - 1))
                self.w[name].mul_(keep.reshape(shape))

    def round(self, number: int, cohort: int) -> None:
        self.prune()
        turn = Turn(keys.key(0), number)
        clients = keys.choose(turn.key(Purpose.COHORT), self.data.clients, cohort)
        slope_w = {name: torch.zeros_like(value) for name, value in self.w.items()}
        slope_v = {group: torch.zeros_like(value) for group, value in self.v.items()}
        for client in clients:
            z, sent = self.client(turn.of(client))
            kept = self.gated({name: torch.ones_like(value) for name, value in self.w.items()}, z)
            for name, value in self.w.items():
                slope_w[name] += kept[name] * (sent[name] - value) / cohort
            for group, v in self.v.items():
                theta = self.theta(self.w, self.v, group)
                slope = z[group] * (1 - theta) - (1 - z[group]) * theta
                slope_v[group] -= slope * torch.sigmoid(v) / T / cohort
        self.step(slope_w, slope_v)

    def step(self, slope_w: dict[str, Tensor], slope_v: dict[str, Tensor]) -> None:
        """One step uphill; whatever momentum says, a weight that has had no effect for good stays where it is."""
        before = {name: value.clone() for name, value in self.w.items()}
        norms = {group: self.norms(self.w, group) for group in self.groups}
        for name, value in self.w.items():
            value.grad = -slope_w[name]
        self.adam.step()
        if self.by_unit:
            self.w["fc1.weight"].copy_(_where(self.gone["conv"].repeat_interleave(9), before, self.w, "fc1.weight"))
            self.w["fc2.weight"].copy_(_where(self.gone["fc1"], before, self.w, "fc2.weight"))
        for group, names in self.groups.items():
            for name in names:
                gone = (
                    self.gone[group]
                    if not self.by_unit
                    else self.gone[group].reshape(-1, *[1] * (self.w[name].dim() - 1))
                )
                self.w[name].masked_fill_(gone, 0.0)
        if self.follow:
            for group, v in self.v.items():
                tau = F.softplus(v) + self.norms(self.w, group) - norms[group]
                v.copy_(torch.where(self.gone[group], v, tau.clamp(min=1e-8).expm1().log()))
        for group, v in self.v.items():
            v.grad = -slope_v[group]
        self.adamax.step()


def _where(columns: Tensor, before: dict[str, Tensor], after: dict[str, Tensor], name: str) -> Tensor:
    return torch.where(columns[None], before[name], after[name])


@pytest.mark.parametrize("mode", ["in-turn", "vectorised"])
@pytest.mark.parametrize(
    ("thresholds", "relaxation"), [("stay", "probability"), ("follow", "probability"), ("stay", "location")]
)
@pytest.mark.parametrize(("by_unit", "server"), [(True, "mean"), (True, "adam"), (False, "adam")])
def test_fedsparse_equals_the_papers_two_algorithms(small_task, by_unit, server, thresholds, relaxation, mode):
    task = small_task(dtype=torch.float64)
    twin = Twin(task, server, by_unit, thresholds == "follow", relaxation)
    algorithm = fedprior.algorithm(
        "fedsparse" if by_unit else "fedsparse-unstructured",
        task.network,
        lambda0=twin.lambda0,
        thresholds=thresholds,
        relaxation=relaxation,
        server_optimiser="Adam(lr=0.001)" if server == "adam" else "SGD(lr=1.0)",
        local_threshold_optimiser=f"Adamax(lr={twin.local_lr})",
        server_threshold_optimiser=f"Adamax(lr={twin.server_lr})",
    )
    rounds = 6
    result = fedprior.run(task, algorithm, rounds=rounds, seed=0, mode=mode, evaluate_every=1, weighting="equal")
    for number in range(1, rounds + 1):
        twin.round(number, 3)
    assert not any("floored" in record for record in result.records)
    sparsities = [record["sparsity"] for record in result.records]
    assert sparsities[0] < sparsities[-2], "nothing was pruned on the way"
    twin.prune()
    trained = result.simulation.algorithm.prior.prune(result.simulation.server)
    for group, v in twin.v.items():
        kept = ~twin.gone[group]
        assert torch.equal(trained["open"][group] > 0, kept)
        torch.testing.assert_close(trained["thresholds"][group][kept], v[kept], rtol=1e-9, atol=1e-11)
    for name, value in twin.w.items():
        mine = trained["weights"][name]
        alive = mine != 0
        torch.testing.assert_close(mine[alive], value[alive], rtol=1e-9, atol=1e-11)
