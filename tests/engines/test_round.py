"""Rounds against independent truths: a plain torch loop, counted messages, naive metrics, the other mode."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedprior
from fedprior import ALGORITHMS
from fedprior.core import keys, trees
from fedprior.core.federated import Shards
from fedprior.core.keys import Purpose, Turn
from fedprior.core.settings import Settings
from fedprior.engines.batches import ClientBatches, Workload
from fedprior.engines.build import build
from fedprior.engines.loop.round import Simulation

HEADER = 24
"""Bytes before the payload, as wire/codec.py's docstring lists them: 4 + 1 + 1 + 2 + 8 + 4 + 4."""


def flat(result):
    """The server's whole state in one vector."""
    return torch.cat([leaf.double().reshape(-1) for _, leaf in trees.leaves(result.simulation.server)])


@pytest.fixture
def messages(monkeypatch):
    """Every message as it was encoded: (message, its bytes)."""
    sent = []
    encode = fedprior.wire.encode

    def spy(message, layout, *rest):
        data = encode(message, layout, *rest)
        sent.append((trees.tree_map(torch.clone, message), data))
        return data

    monkeypatch.setattr("fedprior.wire.encode", spy)
    return sent


@pytest.fixture
def cohorts(monkeypatch):
    """Every cohort trained in turn, with its result: (clients, packets, result)."""
    seen = []
    take_turns = Simulation._take_turns

    def spy(self, clients, packets, *rest):
        step, scores = take_turns(self, clients, packets, *rest)
        seen.append((list(clients), packets, step))
        return step, scores

    monkeypatch.setattr(Simulation, "_take_turns", spy)
    return seen


# ---------------------------------------------------------------------- against a plain torch loop


@pytest.mark.parametrize(("momentum", "epochs"), [(0.0, 1), (0.9, 2)])
def test_fedavg_with_sgd_clients_equals_a_plain_torch_loop(small_task, momentum, epochs):
    task = small_task(dtype=torch.float64)
    settings = {"local_optimiser": f"SGD(lr=0.1, momentum={momentum})"}
    algorithm = fedprior.algorithm("fedavg", task.network, **settings)
    server = copy.deepcopy(task.network.module)
    for number in range(1, 7):
        turn = Turn(keys.key(3), number)
        states, sizes = [], []
        for client in keys.choose(turn.key(Purpose.COHORT), task.data.clients, 3):
            batch_key = turn.of(client).key(Purpose.BATCHES)
            local = copy.deepcopy(server).train()
            optimiser = torch.optim.SGD(local.parameters(), lr=0.1, momentum=momentum)
            for batch in ClientBatches(task.data, client, Workload(4, epochs), batch_key):
                optimiser.zero_grad()
                F.cross_entropy(local(batch.x), batch.y).backward()
                optimiser.step()
            states.append(local.state_dict())
            sizes.append((5, 11, 2, 8, 9, 3)[client])
        pairs = list(zip(sizes, states, strict=True))  # McMahan et al.: Σ n_s w_s / Σ n_s
        server.load_state_dict({name: sum(n * state[name] for n, state in pairs) / sum(sizes) for name in states[0]})

    result = fedprior.run(small_task(dtype=torch.float64), algorithm, rounds=6, seed=3, epochs=epochs)
    for name, value in server.state_dict().items():
        assert (result.model.state_dict()[name] - value).abs().max() < 1e-9
    start = task.network.module.state_dict()
    assert any((server.state_dict()[name] - value).abs().max() > 0.05 for name, value in start.items()), "it trained"


def test_fedprox_with_sgd_clients_equals_a_plain_torch_loop(small_task):
    task, mu = small_task((8, 6), dtype=torch.float64), 0.7
    algorithm = fedprior.algorithm("fedprox", task.network, precision=mu, local_optimiser="SGD(lr=0.1)")
    server = copy.deepcopy(task.network.module)
    for number in range(1, 4):
        turn = Turn(keys.key(0), number)
        states = []
        for client in (0, 1):
            batch_key = turn.of(client).key(Purpose.BATCHES)
            local = copy.deepcopy(server)
            optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
            for batch in ClientBatches(task.data, client, Workload(4, 2), batch_key):
                optimiser.zero_grad()
                pairs = zip(local.parameters(), server.parameters(), strict=True)
                drift = sum((mine - yours.detach()).square().sum() for mine, yours in pairs)
                (F.cross_entropy(local(batch.x), batch.y) + mu / 2 * drift).backward()
                optimiser.step()
            states.append(local.state_dict())
        server.load_state_dict({name: (8 * states[0][name] + 6 * states[1][name]) / 14 for name in states[0]})

    result = fedprior.run(task, algorithm, rounds=3, epochs=2, clients_per_round=2)
    for name, value in server.state_dict().items():
        assert (result.model.state_dict()[name] - value).abs().max() < 1e-9


# ---------------------------------------------------------------------- vectorised equals in turn


@pytest.mark.parametrize("length", [{"epochs": 2}, {"local_steps": 4}], ids=["epochs", "local_steps"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_vectorised_equals_in_turn(small_task, name, length):
    one, other = (
        fedprior.run(small_task(dtype=torch.float64), name, mode=mode, rounds=3, **length)
        for mode in ("in-turn", "vectorised")
    )
    assert (flat(one) - flat(other)).abs().max() < 1e-9
    for a, b in zip(one.records, other.records, strict=True):
        assert a == pytest.approx(b, abs=1e-9, nan_ok=True)
    assert torch.allclose(one.simulation.accuracy, other.simulation.accuracy, equal_nan=True)
    assert one.summary["mode"] == "in-turn"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_vectorised_equals_in_turn_in_single_precision(small_task, name):
    """One round: what a last bit of float32 becomes in several, through T = 0.001 and Adam, says nothing of either."""
    one, other = (fedprior.run(small_task(), name, mode=mode, rounds=1) for mode in ("in-turn", "vectorised"))
    # Adam's first step is the sign of a gradient, which may be rounding alone: a few numbers may lie a step apart.
    assert (flat(one) - flat(other)).abs().quantile(0.99) < 1e-4
    assert [r["train_loss"] for r in one.records] == pytest.approx([r["train_loss"] for r in other.records], rel=1e-4)


def test_dropout_differs_between_steps_clients_and_rounds(small_task):
    masks = []

    class Recorder(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.fc = nn.Dropout(0.5), nn.Linear(64, 4)

        def forward(self, x):
            kept = self.drop(x.flatten(1) * 0 + 1)
            if self.training:
                masks.extend(tuple(row) for row in (kept > 0).tolist())
                assert set(kept.unique().tolist()) == {0.0, 2.0}
            return self.fc(kept)

    source = small_task().data
    clients = [(source.x[source.train[c]], source.y[source.train[c]]) for c in range(source.clients)]
    task = fedprior.own_task(Recorder(), clients, batch_size=4)
    masks.clear()  # building a task tries the model once
    fedprior.run(task, "fedavg", rounds=3, epochs=2, clients_per_round=6, mode="in-turn", workers=1)
    assert len(masks) == 3 * 2 * 38
    assert len(set(masks)) == len(masks)
    assert sum(map(sum, masks)) / (64 * len(masks)) == pytest.approx(0.5, abs=0.02)


def test_modes_agree_on_dropout(small_task):
    one, other = (
        fedprior.run(small_task(dtype=torch.float64, dropout=0.4), "fedavg", mode=mode, epochs=2)
        for mode in ("in-turn", "vectorised")
    )
    assert (flat(one) - flat(other)).abs().max() < 1e-9
    plain = fedprior.run(small_task(dtype=torch.float64), "fedavg", mode="in-turn", epochs=2)
    assert (flat(one) - flat(plain)).abs().max() > 1e-3


@pytest.mark.usefixtures("plain_arithmetic")  # several workers have a thread each; alone there may be more, which add
@pytest.mark.parametrize("name", ["fedavg", "fedsparse"])  # in another order
def test_the_number_of_workers_changes_nothing(small_task, name):
    one, many = (fedprior.run(small_task(dropout=0.4), name, mode="in-turn", workers=n, rounds=4) for n in (1, 3))
    assert one.records == many.records
    assert torch.equal(flat(one), flat(many))


def test_clients_without_test_examples_do_not_count_in_local_accuracy(small_task):
    for mode in ("in-turn", "vectorised"):
        task = small_task(test_sizes=(6, 0, 3, 0, 1, 2))
        result = fedprior.run(task, "fedavg", mode=mode, clients_per_round=6, rounds=2)
        assert result.simulation.accuracy.isnan().tolist() == [False, True, False, True, False, False]
        assert 0 <= result.summary["local_accuracy"] <= 1


def test_an_optimiser_that_is_not_elementwise_trains_in_turn_and_says_so(small_task):
    task = small_task()
    algorithm = fedprior.algorithm("fedavg", task.network, local_optimiser="Adafactor(lr=0.01)")
    with pytest.raises(fedprior.SettingError, match="in turn"):
        fedprior.run(task, algorithm, mode="vectorised")
    assert fedprior.run(task, algorithm, rounds=1).summary["mode"] == "in-turn"


# ---------------------------------------------------------------------- what is sent and counted


def test_fedavg_sends_four_bytes_per_parameter_and_a_header(small_task, messages):
    result = fedprior.run(small_task(), "fedavg", rounds=2)
    parameters = (9 + 1) * 4 + (36 + 1) * 12 + (12 + 1) * 4
    for record in result.records:
        assert record["bytes_up"] == record["bytes_down"] == 3 * (HEADER + 4 * parameters)
    assert {len(data) for _, data in messages} == {HEADER + 4 * parameters}
    assert result.summary["parameters"] == result.summary["effective_parameters"] == parameters
    assert result.summary["bytes_up"] == 2 * 3 * (HEADER + 4 * parameters)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_recorded_bytes_are_the_lengths_of_the_messages_whether_encoded_or_counted(small_task, messages, name):
    encoded = fedprior.run(small_task(), name, rounds=4, mode="in-turn")
    packets = 3 if encoded.simulation.algorithm.prior.per_client else 1
    per_round = packets + 3
    assert len(messages) == 4 * per_round
    for i, record in enumerate(encoded.records):
        lengths = [len(data) for _, data in messages[i * per_round : (i + 1) * per_round]]
        assert record["bytes_down"] == sum(lengths[:packets]) * (3 // packets)
        assert record["bytes_up"] == sum(lengths[packets:])

    counted = fedprior.run(small_task(), name, rounds=4, mode="in-turn", messages="count")
    assert len(messages) == 4 * per_round
    assert counted.records == encoded.records
    assert torch.equal(flat(counted), flat(encoded))


def test_fedsparse_sends_only_what_its_gates_leave(small_task, messages):
    task = small_task()
    fedprior.run(task, fedprior.algorithm("fedsparse", task.network, lambda0=1e-3), rounds=8, epochs=3)
    smallest, differing = math.inf, 0
    for message, data in messages:
        filters, neurons = (int(message["gates"][layer].sum()) for layer in ("conv", "fc1"))
        if "thresholds" in message:
            known, beside = (filters, neurons), filters + 2 * neurons  # a threshold each, and what a neuron has lost
        else:
            beside, differing = 0, differing + ((filters, neurons) != known)
        # A filter with its bias; a neuron with its bias and what it reads of each filter that the server has; what
        # reads the server's neurons.
        left = filters * (9 + 1) + neurons * (known[0] * 9 + 1) + 4 * known[1] + 4
        assert len(data) == HEADER + 2 + 4 * (left + beside)
        smallest = min(smallest, left)
    assert smallest < 536, "some units were closed"
    assert differing, "clients closed units that the server has"


def test_pruned_weights_are_never_sent_again(small_task, messages):
    task = small_task()
    algorithm = fedprior.algorithm("fedsparse", task.network, lambda0=1e-3)
    result = fedprior.run(task, algorithm, rounds=15, epochs=3)
    packets = [message["gates"] for message, _ in messages if "thresholds" in message]
    assert len(packets) == 15
    for before, after in itertools.pairwise(packets):
        for layer, gates in after.items():
            assert (gates <= before[layer]).all(), "a closed unit came back"
    assert result.summary["sparsity"] > 0.1, "there was something to come back"
    uploads = [message for message, _ in messages if "thresholds" not in message]
    for i, upload in enumerate(uploads):
        for layer, gates in upload["gates"].items():
            assert (gates <= packets[i // 3][layer]).all(), "a client opened a gate that the server had closed"


# ---------------------------------------------------------------------- the floor


HARD, HARDER = "Adamax(lr=2.0)", "SGD(lr=10.0)"
FORCED = {
    "clients": ("fedsparse", {"lambda0": 100.0, "local_threshold_optimiser": HARD}),
    "server": ("fedsparse", {"lambda0": 100.0, "server_threshold_optimiser": HARD, "local_threshold_optimiser": HARD}),
    "both": (
        "fedsparse",
        {"lambda0": 1.0, "local_threshold_optimiser": HARDER, "server_threshold_optimiser": HARDER},
    ),
    "closed form": ("fedsparse", {"lambda0": 100.0, "local_threshold_optimiser": HARD, "server_optimiser": "none"}),
    "floor of two": ("fedsparse", {"lambda0": 100.0, "local_threshold_optimiser": HARD, "floor": 2}),
    "weights": (
        "fedsparse-unstructured",
        {"lambda0": 100.0, "local_threshold_optimiser": HARD, "server_optimiser": "none"},
    ),
    "lasso": ("fedl1", {"strength": 50.0}),
    "dropout": ("feddrop", {"linear_rate": 0.999, "input_rate": 0.999}),
}


@pytest.mark.parametrize("force", FORCED)
def test_no_layer_ever_dies_and_the_record_says_when_the_floor_acted(small_task, messages, force):
    name, settings = FORCED[force]
    task = small_task()
    algorithm = fedprior.algorithm(name, task.network, **settings)
    result = fedprior.run(task, algorithm, rounds=8, epochs=2)
    for message, _ in messages:
        for layer, gates in message["gates"].items():
            weight = message["weights"][layer if layer.endswith("weight") else f"{layer}.weight"]
            alive = weight[gates > 0]
            assert len(alive) >= settings.get("floor", 1)
            assert (alive != 0).any(), f"all that is left of {layer} is zero"
    floored = {layer for record in result.records for layer in record.get("floored", [])}
    assert floored
    assert floored <= set(algorithm.prior.gating.gate_shapes)
    for name, parameter in result.model.named_parameters():
        assert name.endswith("bias") or (parameter != 0).any()
    assert force == "dropout" or result.summary["sparsity"] > 0.4, "it was forced hard"


def test_the_servers_floor_keeps_a_unit_with_weights(small_task):
    """A unit that was closed long ago may stand closer to its threshold than the last ones that are open."""
    task = small_task()
    prior = fedprior.algorithm("fedsparse", task.network).prior
    server = prior.init(task.network.params())
    for part in ("weight", "bias"):
        server["weights"][f"conv.{part}"][0] = 0
    server["thresholds"]["conv"] = torch.tensor([-4.0, 8.0, 9.0, 10.0])
    pruned = prior.prune(server)
    left = (pruned["weights"]["conv.weight"].flatten(1) != 0).any(1)
    assert left.tolist() == [False, True, False, False]
    assert prior.open_gates(pruned)[0]["conv"].tolist() == [0, 1, 0, 0]


def test_the_floor_is_not_recorded_when_it_does_nothing(small_task):
    assert not any("floored" in r for r in fedprior.run(small_task(), "fedsparse", rounds=1).records)
    assert not any("floored" in r for r in fedprior.run(small_task(), "fedavg", rounds=2).records)


# ---------------------------------------------------------------------- cohorts and seeds


def test_no_client_is_twice_in_a_cohort(small_task, cohorts):
    for seed in range(10):
        fedprior.run(small_task((2,) * 6), "fedavg", rounds=2, clients_per_round=5, seed=seed)
    for clients, _, _ in cohorts:
        assert len(set(clients)) == len(clients) == 5
        assert set(clients) <= set(range(6))
    assert len({tuple(clients) for clients, _, _ in cohorts}) > 10


def test_all_clients_can_take_part_in_every_round(small_task):
    result = fedprior.run(small_task((2,) * 6), "fedavg", rounds=1, clients_per_round=6)
    assert not result.simulation.accuracy.isnan().any()


@pytest.mark.parametrize("name", ["fedavg", "fedsparse"])
def test_the_seed_decides_everything(small_task, name):
    first, again, other = (fedprior.run(small_task(dropout=0.3), name, seed=seed) for seed in (1, 1, 2))
    assert first.records == again.records
    assert torch.equal(flat(first), flat(again))
    assert first.records != other.records
    assert not torch.equal(flat(first), flat(other))


def test_the_global_random_state_is_neither_read_nor_written(small_task):
    torch.manual_seed(0)
    first = fedprior.run(small_task(dropout=0.3), "fedsparse", rounds=2)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(99)
    assert fedprior.run(small_task(dropout=0.3), "fedsparse", rounds=2).records == first.records


# ---------------------------------------------------------------------- metrics against naive recomputation


@pytest.mark.parametrize("name", ["fedavg", "fedsparse"])
def test_global_accuracy_is_measured_on_all_test_examples(small_task, name):
    task = small_task(test_sizes=(6, 1, 9, 0, 4, 12))
    result = fedprior.run(task, name, rounds=6, epochs=3)
    right = total = 0
    for x, y in zip(task.data.test_x, task.data.test_y, strict=True):
        right += int(result.model(x[None]).argmax() == y)
        total += 1
    assert total == 32
    assert result.summary["global_accuracy"] == result.records[-1]["global_accuracy"] == right / total


def test_an_example_in_two_test_sets_counts_once_in_the_union():
    class Parrot(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.scale * F.one_hot(x[:, 0].long(), 3).float()

    data = fedprior.FederatedData.from_clients([(torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]))] * 2, classes=3)
    # Of rows 0 to 3 only row 3 is wrong, and it belongs to both clients.
    test_x, test_y = torch.tensor([[0.0], [1.0], [2.0], [1.0]]), torch.tensor([0, 1, 2, 0])
    data = replace(data, test_x=test_x, test_y=test_y, test=Shards.of([[0, 3], [3, 1, 2]]))
    task = fedprior.Task("parrot", fedprior.Network(Parrot(), test_x[0]), data)
    algorithm = fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.0)")
    result = fedprior.run(task, algorithm, rounds=1)
    assert result.summary["global_accuracy"] == 3 / 4
    assert result.summary["local_accuracy"] == pytest.approx((1 / 2 + 2 / 3) / 2)


@pytest.mark.parametrize("name", ["fedavg", "fedsparse"])
def test_local_accuracy_is_that_of_the_model_each_client_last_sent(small_task, cohorts, name):
    task = small_task(test_sizes=(6, 1, 9, 5, 4, 12))
    result = fedprior.run(task, name, rounds=6, epochs=2, clients_per_round=2, mode="in-turn")
    latest = {}
    for i, (clients, _, outcome) in enumerate(cohorts):
        for position, client in enumerate(clients):
            local = copy.deepcopy(task.network.module).eval()
            local.load_state_dict({key: value[position] for key, value in outcome.upload["weights"].items()})
            rows = task.data.test[client]
            latest[client] = float((local(task.data.test_x[rows]).argmax(-1) == task.data.test_y[rows]).double().mean())
        if "local_accuracy" in result.records[i]:
            expected = sum(latest.values()) / len(latest)
            assert result.records[i]["local_accuracy"] == pytest.approx(expected, abs=1e-12)
    assert 2 < len(latest) <= 6


def test_disagreement_is_the_distance_of_clients_gates_from_the_servers(small_task, cohorts):
    task = small_task(dtype=torch.float64)
    algorithm = fedprior.algorithm("fedsparse", task.network, lambda0=1e-3, temperature=2e-3)
    result = fedprior.run(task, algorithm, rounds=4, epochs=3, mode="in-turn")
    for record, (_, packets, outcome) in zip(result.records, cohorts, strict=True):
        if "tv_mean" not in record:
            assert record["round"] % 2 == 1
            continue
        distances = []
        for layer in ("conv", "fc1"):
            for unit in range(len(packets["thresholds"][layer][0])):
                row = packets["weights"][f"{layer}.weight"][0][unit].reshape(-1)
                lost = float(packets["silent"][layer][0][unit]) if layer == "fc1" else 0.0
                threshold = math.log1p(math.exp(float(packets["thresholds"][layer][0][unit])))
                theta = 1 / (1 + math.exp(-(math.hypot(float(row.norm()), lost) - threshold) / 2e-3))
                theta = theta if packets["gates"][layer][0][unit] > 0 else 0.0
                distances += [abs(float(outcome.gates[layer][s][unit]) - theta) for s in range(3)]
        assert record["tv_mean"] == pytest.approx(sum(distances) / len(distances), abs=1e-9)
        assert record["tv_max"] == pytest.approx(max(distances), abs=1e-9)
        assert record["tv_max"] > 1e-3


def test_sparsity_is_the_missing_share_of_the_servers_model(small_task):
    task = small_task()
    algorithm = fedprior.algorithm("fedsparse", task.network, lambda0=1e-3)
    result = fedprior.run(task, algorithm, rounds=12, epochs=3)
    filters, neurons = (
        (result.model.get_parameter(f"{x}.weight").flatten(1) != 0).any(1).sum() for x in ("conv", "fc1")
    )
    left = int(filters * (9 + 1) + neurons * (filters * 9 + 1) + 4 * neurons + 4)
    assert result.summary["effective_parameters"] == left
    assert result.summary["sparsity"] == pytest.approx(1 - left / 536)
    assert 0 < result.summary["sparsity"] < 1


def test_training_loss_is_the_mean_over_steps_and_clients(small_task):
    task = small_task((4, 4))
    algorithm = fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.0)")
    result = fedprior.run(task, algorithm, rounds=1, clients_per_round=2, epochs=2)
    # Nothing moves, every batch is the whole client: the loss is that of the start.
    expected = [
        F.cross_entropy(task.network.module(task.data.x[rows]), task.data.y[rows])
        for rows in ([0, 1, 2, 3], [4, 5, 6, 7])
    ]
    assert result.records[0]["train_loss"] == pytest.approx(float(sum(expected).detach() / 2), rel=1e-5)


def test_evaluation_happens_when_due_and_after_the_last_round(small_task):
    result = fedprior.run(small_task(), "fedavg", rounds=7, evaluate_every=3)
    assert [record["round"] for record in result.records if "global_accuracy" in record] == [3, 6, 7]


# ---------------------------------------------------------------------- divergence


@pytest.mark.parametrize("mode", ["in-turn", "vectorised"])
def test_a_diverged_client_is_named_with_its_round(diverging_task, mode):
    with pytest.raises(fedprior.DivergedError, match=r"client 1 diverged in round 1\b"):
        fedprior.run(diverging_task(), "fedavg", mode=mode, clients_per_round=3)


@pytest.mark.parametrize("name", ["fedavg", "feddrop", "fednarrow"])
def test_the_shipped_model_is_an_average_in_which_late_rounds_count_more(small_task, name):
    """Against the weights that polynomial decay comes to: round i of n counts as (i + 18)! / (i − 1)! does."""
    task = small_task(dtype=torch.float64)
    algorithm = fedprior.algorithm(name, task.network, average=True)
    sim = build(algorithm, task.network, task.data, Settings(**{**task.defaults, "rounds": 4}))
    seen = []
    for _ in range(4):
        sim.step(evaluate=False)
        seen.append(sim.server["weights"])
    counts = [math.factorial(i + 18) / math.factorial(i - 1) for i in range(1, 5)]
    for key, value in sim.server["average"].items():
        expected = sum(c * weights[key] for c, weights in zip(counts, seen, strict=True)) / sum(counts)
        torch.testing.assert_close(value, expected)
    shipped = algorithm.predict(sim.server)
    plain = algorithm.prior.predict({**sim.server, "weights": sim.server["average"]})
    assert all(torch.equal(shipped[key], value) for key, value in plain.items())
