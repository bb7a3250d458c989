"""SCAFFOLD against a naive twin, and its effect on the extreme split of the paper's appendix."""

import numpy as np
import pytest
import torch
from torch import nn

import fedprior
from fedprior.catalogue.data.embedded import mnist_mini
from fedprior.catalogue.models import LogisticRegression
from fedprior.catalogue.tasks import Task
from fedprior.core import keys
from fedprior.core.keys import Purpose, Turn
from fedprior.engines.batches import ClientBatches, Workload


def small_task() -> Task:
    torch.manual_seed(1)
    data = [(torch.randn(n, 5).double(), torch.randint(0, 3, (n,))) for n in (6, 9, 13, 4)]
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return fedprior.own_task(model, data, classes=3, batch_size=4, clients_per_round=2, rounds=5, evaluate_every=5)


def naive_scaffold(rounds: int, lr: float, weighting: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Algorithm 1 of Karimireddy et al., option II, with η_g = 1, written for one model on lists of tensors.

    Client i counts p_i: 1/4 as in the paper, or its share of the 32 examples.
    """
    task, count = small_task(), 4
    p_i = [1 / 4] * 4 if weighting == "equal" else [6 / 32, 9 / 32, 13 / 32, 4 / 32]
    model = task.network.module
    x = [p.detach().clone() for p in model.parameters()]
    c = [torch.zeros_like(p) for p in x]
    c_i = [[torch.zeros_like(p) for p in x] for _ in range(count)]
    for t in range(1, rounds + 1):
        turn = Turn(keys.key(0), t)
        cohort = keys.choose(turn.key(Purpose.COHORT), count, 2)
        moves, changes = [], []
        for i in cohort:
            for p, value in zip(model.parameters(), x, strict=True):
                p.data = value.clone()
            batches = ClientBatches(task.data, i, Workload(4), turn.of(i).key(Purpose.BATCHES))
            for batch in batches:
                model.zero_grad()
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                for p, mine, ours in zip(model.parameters(), c_i[i], c, strict=True):
                    assert p.grad is not None
                    p.data -= lr * (p.grad - mine + ours)
            y = [p.detach().clone() for p in model.parameters()]
            new = [
                mine - ours + (a - b) / (len(batches) * lr) for mine, ours, a, b in zip(c_i[i], c, x, y, strict=True)
            ]
            moves.append([b - a for a, b in zip(x, y, strict=True)])
            changes.append([a - b for a, b in zip(new, c_i[i], strict=True)])
            c_i[i] = new
        here = sum(p_i[i] for i in cohort)
        x = [a + sum(p_i[i] / here * m[j] for i, m in zip(cohort, moves, strict=True)) for j, a in enumerate(x)]
        c = [a + sum(p_i[i] * d[j] for i, d in zip(cohort, changes, strict=True)) for j, a in enumerate(c)]
    return x, c


@pytest.mark.parametrize("weighting", ["equal", "examples"])
@pytest.mark.parametrize("mode", ["in-turn", "vectorised"])
def test_scaffold_is_option_ii_of_the_paper(mode: str, weighting: str) -> None:
    task = small_task()
    chosen = fedprior.algorithm("scaffold", task.network, local_optimiser="SGD(lr=0.2)")
    server = fedprior.run(task, chosen, mode=mode, weighting=weighting).simulation.server
    x, c = naive_scaffold(5, 0.2, weighting)
    for ours, theirs in zip(server["weights"].values(), x, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for ours, theirs in zip(server["control"].values(), c, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_with_momentum_controls_keep_the_size_of_gradients() -> None:
    """Taken for lr times steps, the longer path of momentum would feed on itself."""
    task = small_task()
    size = {}
    for local in ("SGD(lr=0.05)", "SGD(lr=0.05, momentum=0.9)"):
        chosen = fedprior.algorithm("scaffold", task.network, local_optimiser=local)
        result = fedprior.run(task, chosen, rounds=20, epochs=10, device="cpu")
        size[local] = max(float(c.abs().max()) for c in result.simulation.server["control"].values())
        assert result.records[-1]["train_loss"] < result.records[0]["train_loss"]
    assert max(size.values()) < 10 * min(size.values())


def test_controls_double_the_message() -> None:
    runs = [fedprior.run(small_task(), name, rounds=1).summary for name in ("fedavg", "scaffold")]
    payload = 8 * 39  # a double a parameter
    for direction in ("bytes_up", "bytes_down"):
        assert runs[1][direction] - runs[0][direction] == 2 * payload


def single_class_task() -> Task:
    """100 users, each with 100 digits of one class: the paper's extreme split, on the embedded digits."""
    images = mnist_mini()
    clients = []
    for user in range(100):
        digit, turn = user % 10, user // 10
        rows = np.flatnonzero(images.y == digit)[turn * 100 : (turn + 1) * 100]
        tests = np.flatnonzero(images.test_y == digit)[turn * 20 : (turn + 1) * 20]
        clients.append(
            (
                *(images.x[rows], torch.from_numpy(images.y[rows])),
                *(images.test_x[tests], torch.from_numpy(images.test_y[tests])),
            )
        )
    torch.manual_seed(0)
    return fedprior.own_task(LogisticRegression(), clients, classes=10, batch_size=20, rounds=60, evaluate_every=20)


@pytest.fixture(scope="module")
def summaries() -> dict[str, dict[str, float]]:
    settings: dict[str, dict[str, object]] = {
        "fedavg": {},
        "scaffold": {},
        "fedsparse-unstructured": {"server_optimiser": "SGD(lr=1.0)"},
        "fedsparse+scaffold": {"server_optimiser": "SGD(lr=1.0)", "structured": False},
    }
    found = {}
    for name, values in settings.items():
        task = single_class_task()
        chosen = fedprior.algorithm(name, task.network, **values)
        found[name] = fedprior.run(task, chosen, mode="vectorised").summary
    return found


def test_scaffold_beats_fedavg_globally_and_not_locally(summaries: dict[str, dict[str, float]]) -> None:
    assert summaries["scaffold"]["global_accuracy"] > summaries["fedavg"]["global_accuracy"] + 0.01
    assert summaries["scaffold"]["local_accuracy"] < summaries["fedavg"]["local_accuracy"]


def test_scaffold_combines_with_fedsparse(summaries: dict[str, dict[str, float]]) -> None:
    both, sparse = summaries["fedsparse+scaffold"], summaries["fedsparse-unstructured"]
    assert both["global_accuracy"] > sparse["global_accuracy"] + 0.01
    assert both["local_accuracy"] < sparse["local_accuracy"]
    assert both["sparsity"] > 0.02


@pytest.mark.parametrize(
    "name",
    ["fedprox", "fedadam", "fedsparse", "fedsparse-unstructured", "fedmedian", "fedmix", "feddrop", "fedl1"],
)
def test_scaffold_composes_with_every_prior(name: str) -> None:
    """Vectorised equals in turn, and c stays the mean of all c_s by examples, whatever the gates hold back."""
    lively = {"fedsparse": {"lambda0": 1e-2}, "fedsparse-unstructured": {"lambda0": 1e-2}, "fedl1": {"strength": 0.8}}
    servers = []
    for mode in ("vectorised", "in-turn"):
        task = small_task()
        chosen = fedprior.algorithm(name, task.network, scaffold=True, **lively.get(name, {}))
        sim = fedprior.run(task, chosen, mode=mode, epochs=2, rounds=6).simulation
        for parameter, c in sim.server["control"].items():
            blank = torch.zeros_like(c)
            held = [sim.memory[i]["control"][parameter] if i in sim.memory else blank for i in range(4)]
            mean = (6 * held[0] + 9 * held[1] + 13 * held[2] + 4 * held[3]) / 32
            torch.testing.assert_close(c, mean, rtol=0, atol=1e-12)
        assert max(float(c.abs().max()) for c in sim.server["control"].values()) > 1e-3
        servers.append(sim.server["weights"])
    for parameter, value in servers[0].items():
        torch.testing.assert_close(value, servers[1][parameter], rtol=0, atol=1e-9)
