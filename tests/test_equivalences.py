"""One algorithm is another with a setting at its limit. In double precision, over several rounds."""

import pytest
import torch
from torch import Tensor, nn

import fedprior
from fedprior.catalogue.tasks import Task
from fedprior.core import keys
from fedprior.core.keys import Purpose, Turn
from fedprior.core.optimisers import Optimiser
from fedprior.em import Algorithm
from fedprior.engines.batches import ClientBatches, Workload
from fedprior.priors import FixedGates, Gaussian, Mixture, SpikeSlab
from fedprior.units import UnitGating, find_structure
from small_world import PlainNet

SGD = Optimiser("SGD", {"lr": 0.1})


def make_task(sizes: tuple[int, ...] = (6, 9, 13, 4)) -> Task:
    torch.manual_seed(3)
    data = [(torch.randn(n, 1, 8, 8).double(), torch.randint(0, 3, (n,))) for n in sizes]
    return fedprior.own_task(
        PlainNet().double(), data, rounds=4, batch_size=4, clients_per_round=3, evaluate_every=4, classes=3
    )


def weights_after(algorithm: Algorithm, rounds: int = 4) -> dict[str, Tensor]:
    result = fedprior.run(make_task(), algorithm, rounds=rounds)
    return dict(result.simulation.server["weights"])


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name, value in a.items():
        torch.testing.assert_close(value.reshape(b[name].shape), b[name], rtol=0, atol=1e-12)


def named(name: str, **settings: object) -> Algorithm:
    return fedprior.algorithm(name, make_task().network, **settings)


def unit_gating() -> UnitGating:
    network = make_task().network
    return UnitGating(find_structure(network.module, network.example))


FEDAVG = Algorithm(Gaussian(), {"weights": SGD})


def test_fedprox_is_the_gaussian_prior_with_that_precision() -> None:
    """The reference adds μ(φ − w) to the gradient by hand."""
    mu, task = 0.7, make_task()
    ours = weights_after(named("fedprox", precision=mu, local_optimiser="SGD(lr=0.1)"), rounds=1)

    turn = Turn(keys.key(0), 1)
    cohort = keys.choose(turn.key(Purpose.COHORT), 4, 3)
    results = []
    for client in cohort:
        model = make_task().network.module
        start = [p.detach().clone() for p in model.parameters()]
        key = turn.of(client).key(Purpose.BATCHES)
        for batch in ClientBatches(task.data, client, Workload(4), key):
            model.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            with torch.no_grad():
                for p, w in zip(model.parameters(), start, strict=True):
                    assert p.grad is not None
                    p -= 0.1 * (p.grad + mu * (p - w))
        results.append({name: p.detach() for name, p in model.named_parameters()})
    sizes = [task.data.train.size(client) for client in cohort]
    pairs = list(zip(sizes, results, strict=True))
    assert_same(ours, {name: sum(n * r[name] for n, r in pairs) / sum(sizes) for name in results[0]})


def test_fedavg_is_the_limit_of_small_precision() -> None:
    exact = weights_after(FEDAVG)
    near = weights_after(Algorithm(Gaussian(1e-9), {"weights": SGD}))
    far = weights_after(Algorithm(Gaussian(1.0), {"weights": SGD}))
    for name, value in exact.items():
        torch.testing.assert_close(near[name], value, rtol=0, atol=1e-8)
    assert max(float((far[name] - value).abs().max()) for name, value in exact.items()) > 1e-3


def test_reptile_is_one_sgd_step_towards_the_mean() -> None:
    start = make_task().network.params()
    mean, reptile = weights_after(FEDAVG, 1), weights_after(named("reptile", local_optimiser="SGD(lr=0.1)"), 1)
    assert_same(reptile, {name: w + 0.5 * (mean[name] - w) for name, w in start.items()})


def test_fedavgm_without_momentum_is_fedavg() -> None:
    plain = named("fedavgm", local_optimiser="SGD(lr=0.1)", server_optimiser="SGD(lr=1.0)")
    assert_same(weights_after(plain), weights_after(FEDAVG))


class WideOpen(SpikeSlab):
    """Starts its thresholds far below every norm: θ = 1 whatever the weights do."""

    def init(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        thresholds = {layer: torch.full(shape, -50.0).double() for layer, shape in self.gating.gate_shapes.items()}
        return {"weights": params, "thresholds": thresholds}


def test_spike_slab_with_open_fixed_gates_is_fedavg() -> None:
    """θ = 1 and thresholds that do not move: every gate is open in training, on the wire and at the server."""
    still = Optimiser("SGD", {"lr": 0.0})
    local = {"weights": SGD, "thresholds": still}
    server = {"weights": Optimiser("SGD", {"lr": 1.0}), "thresholds": still}
    prior = WideOpen(unit_gating(), lambda0=0.0, cross_entropy=0.0)
    assert_same(weights_after(Algorithm(prior, local, server)), weights_after(FEDAVG))


def test_feddrop_with_rate_zero_is_fedavg() -> None:
    rates = dict.fromkeys(unit_gating().gate_shapes, 0.0)
    assert_same(weights_after(Algorithm(FixedGates(unit_gating(), rates), {"weights": SGD})), weights_after(FEDAVG))


def test_feddrop_by_name_at_rate_zero_is_fedavg() -> None:
    zero = named(
        "feddrop", conv_rate=0.0, linear_rate=0.0, input_rate=0.0, output_rate=0.0, local_optimiser="SGD(lr=0.1)"
    )
    assert_same(weights_after(zero), weights_after(FEDAVG))


@pytest.mark.parametrize("server", [None, "SGD(lr=0.3)"])
def test_mixture_of_one_is_fedprox(server: str | None) -> None:
    optimiser = {"weights": Optimiser.parse(server)} if server else None
    one = Algorithm(Mixture(components=1, precision=0.6), {"weights": SGD}, optimiser)
    assert_same(weights_after(one), weights_after(Algorithm(Gaussian(0.6), {"weights": SGD}, optimiser)))


def test_scaffold_with_zero_controls_is_fedavg() -> None:
    """Before anyone has learned a control variate, which is the whole first round."""
    assert_same(weights_after(named("scaffold", local_optimiser="SGD(lr=0.1)"), 1), weights_after(FEDAVG, 1))
    later = weights_after(named("scaffold", local_optimiser="SGD(lr=0.1)"), 4)
    assert max(float((later[n] - v).abs().max()) for n, v in weights_after(FEDAVG, 4).items()) > 1e-4


def test_fedl1_without_strength_is_fedavg() -> None:
    zero = named("fedl1", strength=0.0, local_optimiser="SGD(lr=0.1)", server_optimiser="none")
    assert_same(weights_after(zero), weights_after(FEDAVG))


def test_fedmedian_of_one_client_is_that_client() -> None:
    task = make_task()
    one = fedprior.run(task, named("fedmedian", precision=0.0, local_optimiser="SGD(lr=0.1)"), clients_per_round=1)
    other = fedprior.run(make_task(), FEDAVG, clients_per_round=1)
    assert_same(dict(one.simulation.server["weights"]), dict(other.simulation.server["weights"]))
