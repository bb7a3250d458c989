"""Clients that count by their examples: every prior against plain loops, and the property that defines the weights."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import fedprior
from fedprior.core import trees, weighting
from fedprior.core.errors import SettingError
from fedprior.core.optimisers import TreeOptimiser
from fedprior.core.settings import Settings
from fedprior.em import m_step
from fedprior.engines.build import build
from fedprior.engines.stacked.together import Together
from fedprior.priors import Gaussian

D = torch.float64
NAMES = {
    "fedavg": {},
    "fedmedian": {},
    "fedtrim": {},
    "fedstudent": {"scale": 0.3},
    "fedgeomedian": {},
    "fedmix": {"precision": 0.05},
    "feddrop": {},
    "fedl1": {"server_optimiser": "none", "strength": 0.3},
    "fedsparse": {"server_optimiser": "none", "temperature": 0.1},
    "fednarrow": {"sparsity": 0.3, "server_optimiser": "none"},
    "fedsparse-unstructured": {"server_optimiser": "none", "temperature": 0.1},
}
STEPPED = {**NAMES, "fedsparse": {"temperature": 0.1}, "fedsparse-unstructured": {"temperature": 0.1}}


def small_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(D)
    return fedprior.own_task(model, [(torch.randn(4, 4, dtype=D), torch.arange(4) % 3)]).network


def situation(name, options, clients=4, step=None):
    """An algorithm, a server on its way, and what some clients have sent: each moved, some with gates closed."""
    network = small_network()
    given = {**options, **({"server_optimiser": step} if step else {})}
    algorithm = fedprior.algorithm(name, network, **given)
    server = algorithm.prior.prune(algorithm.init(network.params()))
    draw, uploads = torch.Generator().manual_seed(3), []
    for client in range(clients):
        packet = algorithm.prior.receive(algorithm.broadcast(server, torch.tensor(17 * client + 1)))
        local = algorithm.prior.adopt(packet, torch.tensor(5), lambda params: params["0.bias"].sum())
        moved = {n: w + 0.3 * torch.randn(w.shape, generator=draw, dtype=D) for n, w in local["weights"].items()}
        local = {**local, "weights": moved}
        uploads.append(algorithm.prior.commit(local, packet, torch.tensor(1000 + client)))
    uploads = [{part: upload[part] for part in ("weights", "gates") if part in upload} for upload in uploads]
    return algorithm, server, uploads


def solved(algorithm, server, uploads, weight=None):
    optimiser = TreeOptimiser(algorithm.server, server) if algorithm.server else None
    return m_step(algorithm, server, trees.stack(uploads), optimiser, 1.0, weight)


def close(one, other, atol=1e-12):
    for (path, mine), (_, theirs) in zip(trees.leaves(one), trees.leaves(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol, msg=lambda text, path=path: f"{path}: {text}")


# ---------------------------------------------------------------------- what a weight means


@pytest.mark.parametrize("name", NAMES)
def test_a_client_of_weight_two_equals_two_clients_in_closed_form(name):
    algorithm, server, uploads = situation(name, NAMES[name])
    twice = [uploads[0], uploads[1], uploads[1], *uploads[2:], *[uploads[3]] * 3]
    counts = torch.tensor([1.0, 2, 1, 4], dtype=D)
    close(solved(algorithm, server, uploads, counts), solved(algorithm, server, twice))
    assert any(
        not torch.allclose(a, b)
        for (_, a), (_, b) in zip(
            trees.leaves(solved(algorithm, server, uploads, counts)),
            trees.leaves(solved(algorithm, server, uploads)),
            strict=True,
        )
    ), "and it matters"


@pytest.mark.parametrize("name", STEPPED)
def test_a_client_of_weight_two_equals_two_clients_by_gradient(name):
    """One SGD step of a server is linear in the gradient, so nothing is hidden by an optimiser that forgets scale."""
    algorithm, server, uploads = situation(name, STEPPED[name], step="SGD(lr=0.7)")
    twice = [uploads[0], uploads[1], uploads[1], *uploads[2:], *[uploads[3]] * 3]
    counts = torch.tensor([1.0, 2, 1, 4], dtype=D)
    close(solved(algorithm, server, uploads, counts), solved(algorithm, server, twice))


@pytest.mark.parametrize("step", [None, "SGD(lr=0.7)"])
@pytest.mark.parametrize("name", NAMES)
def test_clients_of_equal_size_give_the_plain_mean_bit_for_bit(name, step):
    algorithm, server, uploads = situation(name, NAMES[name], step=step)
    plain, counted = (solved(algorithm, server, uploads, w) for w in (None, torch.full((4,), 37.0, dtype=D)))
    for (path, one), (_, other) in zip(trees.leaves(plain), trees.leaves(counted), strict=True):
        assert torch.equal(one, other), path


# ---------------------------------------------------------------------- naive twins, in plain loops


def numbers(tensor):
    return tensor.flatten().tolist()


def naive_means(uploads, sizes, name):
    columns = zip(*(numbers(upload["weights"][name]) for upload in uploads), strict=True)
    return [sum(n * x for n, x in zip(sizes, column, strict=True)) / sum(sizes) for column in columns]


SIZES = [200, 1, 7, 40]


def test_fedavg_is_mcmahans_mean():
    algorithm, server, uploads = situation("fedavg", {})
    found = solved(algorithm, server, uploads, torch.tensor(SIZES, dtype=D))["weights"]
    for name, value in found.items():
        assert numbers(value) == pytest.approx(naive_means(uploads, SIZES, name), abs=1e-13)


def test_the_median_has_half_of_the_examples_on_either_side():
    """By writing every value down as often as it counts."""
    draw = np.random.default_rng(0)
    for sizes in ([3, 1, 2, 4], [1, 1, 2], [200, 1, 7, 40], [2, 2, 2, 2], [5, 1, 1, 3], [1, 1], [2, 3]):
        values = torch.from_numpy(draw.normal(size=(len(sizes), 3, 4)).round(1))
        expected = np.median(np.repeat(values.numpy(), sizes, axis=0), axis=0)
        found = weighting.median(values, torch.tensor(sizes, dtype=D))
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-15)


def test_responsibilities_are_shared_by_examples():
    algorithm, server, uploads = situation("fedmix", {"precision": 0.05, "components": 2})
    found = solved(algorithm, server, uploads, torch.tensor(SIZES, dtype=D))["weights"]
    centres = [trees.row(server["weights"], k) for k in range(2)]
    shares = []
    for upload in uploads:
        distances = [
            sum(float((upload["weights"][n] - centre[n]).square().sum()) for n in centre) for centre in centres
        ]
        likely = [np.exp(-0.05 / 2 * d) for d in distances]
        shares.append([x / sum(likely) for x in likely])
    for k in range(2):
        counts = [n * share[k] for n, share in zip(SIZES, shares, strict=True)]
        for name, value in found.items():
            assert numbers(value[k]) == pytest.approx(naive_means(uploads, counts, name), abs=1e-12)


@pytest.mark.parametrize("name", ["feddrop", "fedsparse-unstructured"])
def test_gated_means_and_votes_count_examples(name):
    options = {"feddrop": {"linear_rate": 0.5, "input_rate": 0.5, "output_rate": 0.0}}.get(name, NAMES[name])
    algorithm, server, uploads = situation(name, options)
    found = solved(algorithm, server, uploads, torch.tensor(SIZES, dtype=D))
    masks = [
        {
            n: torch.ones_like(w) * algorithm.prior.support(upload["gates"]).get(n, 1.0)
            for n, w in upload["weights"].items()
        }
        for upload in uploads
    ]
    for parameter, value in found["weights"].items():
        for place, mine in enumerate(numbers(value)):
            on = [numbers(mask[parameter])[place] for mask in masks]
            counts = [n * z for n, z in zip(SIZES, on, strict=True)]
            old = numbers(server["weights"][parameter])[place]
            sent = [numbers(upload["weights"][parameter])[place] for upload in uploads]
            mean = sum(c * x for c, x in zip(counts, sent, strict=True)) / sum(counts) if sum(counts) else old
            assert mine == pytest.approx(mean, abs=1e-12)


def test_gates_are_voted_on_by_examples():
    """θ of the closed form is the share of examples whose clients kept the weight."""
    algorithm, server, uploads = situation("fedsparse-unstructured", {"server_optimiser": "none", "temperature": 0.1})
    found = solved(algorithm, server, uploads, torch.tensor(SIZES, dtype=D))
    theta = algorithm.prior.gates({k: v for k, v in found.items() if k in ("weights", "thresholds")})
    tau_can = {layer: numbers(v) for layer, v in found["thresholds"].items()}
    voted = 0
    for layer, gates in theta.items():
        for place, mine in enumerate(numbers(gates)):
            votes = [numbers(upload["gates"][layer])[place] for upload in uploads]
            share = sum(n * z for n, z in zip(SIZES, votes, strict=True)) / sum(SIZES)
            share = min(max(share, 0.01), 0.99)
            if tau_can[layer][place] > -15:  # where a positive threshold for that θ exists
                assert mine == pytest.approx(share, abs=1e-9)
                voted += 0.01 < share < 0.99
    assert voted > 3, "some clients disagree"


# ---------------------------------------------------------------------- runs


def test_two_hundred_examples_outweigh_one(small_task):
    """The issue's own case: the server stands where the large client is, up to a part in a hundred of both moves."""
    task = small_task((200, 2))
    algorithm = fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.1)")
    runs = {
        kind: build(algorithm, task.network, task.data, Settings(clients_per_round=2, device="cpu", weighting=kind))
        for kind in weighting.KINDS
    }
    for sim in runs.values():
        sim.step(evaluate=False)
    alone = small_task((200, 2))
    only = dataclasses.replace(alone.data, train=type(alone.data.train).of([alone.data.train[0]]))
    only = dataclasses.replace(only, test=type(alone.data.test).of([alone.data.test[0]]))
    large = build(algorithm, alone.network, only, Settings(clients_per_round=1, device="cpu"))
    large.step(evaluate=False)
    start = task.network.params()

    def away(server):
        moved = [
            (server["weights"][n] - large.server["weights"][n]).norm() / (w - start[n]).norm()
            for n, w in large.server["weights"].items()
        ]
        return float(torch.stack(moved).max())

    assert away(runs["examples"].server) < 0.05
    assert away(runs["equal"].server) > 0.3


@pytest.mark.parametrize("kind", weighting.KINDS)
@pytest.mark.parametrize("name", ["fedavg", "fedmedian", "fedmix", "fedsparse", "fedsparse+scaffold", "fedadam"])
def test_stacked_runs_with_different_sizes_equal_runs_alone(small_task, name, kind):
    """Two runs whose partitions differ: one of clients of one size, one not."""
    tasks = [small_task(sizes, dtype=torch.float64) for sizes in ((4, 4, 4, 4, 4), (2, 8, 2, 5, 3))]
    shared = tasks[0]
    joint = fedprior.FederatedData.from_clients(
        [(torch.cat([t.data.x for t in tasks]), torch.cat([t.data.y for t in tasks]))], classes=4
    )
    parts = [np.split(np.arange(20), np.cumsum(sizes)[:-1]) for sizes in ((4, 4, 4, 4, 4), (2, 8, 2, 5, 3))]
    shards = [type(joint.train).of(part) for part in (parts[0], [rows + 20 for rows in parts[1]])]
    empty = type(joint.test).of([np.zeros(0, np.int64)] * 5)
    data = [dataclasses.replace(joint, train=shard, test=empty) for shard in shards]
    algorithm = fedprior.algorithm(name, shared.network)

    def simulations():
        chosen = Settings(clients_per_round=3, batch_size=4, device="cpu", weighting=kind)
        return [build(algorithm, shared.network, own, chosen) for own in data]

    together, alone = simulations(), simulations()
    engine = Together(together)
    for _ in range(3):
        engine.step(evaluate=False)
        for sim in alone:
            sim.step(evaluate=False)
    for one, other in zip(together, alone, strict=True):
        close(one.server, other.server, atol=1e-9)


def test_an_own_prior_without_weights_is_a_one_line_error(small_task):
    class Older(Gaussian):
        def solve(self, assignments, server):
            return super().solve(assignments, server)

    sgd = {"weights": fedprior.Optimiser("SGD", {"lr": 0.1})}
    with pytest.raises(SettingError, match=r"solve of Older takes no weight.*weighting=equal"):
        fedprior.run(small_task(), fedprior.Algorithm(Older(), sgd))
    fedprior.run(small_task(), fedprior.Algorithm(Older(), sgd), rounds=1, weighting="equal")
    fedprior.run(small_task((4, 4, 4)), fedprior.Algorithm(Older(), sgd), rounds=1)


def test_weighting_is_checked_and_recorded_and_older_runs_are_equal(small_task, tmp_path):
    with pytest.raises(SettingError, match="weighting must be examples or equal, got 'size'"):
        Settings(weighting="size")
    task = small_task()
    fedprior.run(task, "fedavg", rounds=1, out=tmp_path / "new", weighting="equal")
    config = tmp_path / "new" / "config.toml"
    assert 'weighting = "equal"' in config.read_text()
    config.write_text(config.read_text().replace('weighting = "equal"\n', ""))
    assert fedprior.resume(tmp_path / "new", task=task).simulation.settings.weighting == "equal"
