"""Top-K with error feedback: a twin in plain loops, what travels, and nothing is ever lost."""

import pytest
import torch
from torch import nn

import fedprior
from fedprior.catalogue.tasks import Task
from fedprior.core import keys, trees
from fedprior.core.errors import SettingError
from fedprior.core.keys import Purpose, Turn
from fedprior.core.settings import Settings
from fedprior.engines.batches import ClientBatches, Workload
from fedprior.engines.build import build


def small_task() -> Task:
    torch.manual_seed(1)
    data = [(torch.randn(n, 5).double(), torch.randint(0, 3, (n,))) for n in (6, 9, 13, 4)]
    data = [(*one, *one) for one in data]
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return fedprior.own_task(model, data, classes=3, batch_size=4, clients_per_round=2, rounds=6, evaluate_every=6)


def naive_top_k(rounds: int, lr: float, share: float) -> torch.Tensor:
    """Every client counts equally; the whole model as one vector."""
    task = small_task()
    model = task.network.module
    x = nn.utils.parameters_to_vector(model.parameters()).detach()
    error, count = torch.zeros(4, len(x)).double(), max(1, round(share * len(x)))
    for t in range(1, rounds + 1):
        turn, moves = Turn(keys.key(0), t), []
        for i in keys.choose(turn.key(Purpose.COHORT), 4, 2):
            nn.utils.vector_to_parameters(x.clone(), model.parameters())
            for batch in ClientBatches(task.data, i, Workload(4), turn.of(i).key(Purpose.BATCHES)):
                model.zero_grad()
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                for p in model.parameters():
                    assert p.grad is not None
                    p.data -= lr * p.grad
            meant = nn.utils.parameters_to_vector(model.parameters()).detach() - x + error[i]
            sent = torch.zeros_like(meant)
            for place in sorted(range(len(x)), key=lambda j: -abs(float(meant[j])))[:count]:
                sent[place] = meant[place]
            error[i] = meant - sent
            moves.append(sent)
        x = x + torch.stack(moves).mean(0)
    return x


@pytest.mark.parametrize("mode", ["in-turn", "vectorised"])
def test_top_k_is_what_the_twin_does(mode: str) -> None:
    task = small_task()
    chosen = fedprior.algorithm("fedtopk", task.network, top_k=0.1, local_optimiser="SGD(lr=0.2)")
    server = fedprior.run(task, chosen, mode=mode, weighting="equal").simulation.server
    found = torch.cat([value.flatten() for value in server["weights"].values()])
    torch.testing.assert_close(found, naive_top_k(6, 0.2, 0.1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedprox", "fedsparse", "fednarrow", "feddrop", "fedl1", "fedmedian", "fedmix"]
)
def test_it_composes_with_every_prior_and_its_messages_are_short(name: str) -> None:
    """Both ways to run agree, the messages are counted as they are, and few entries travel."""
    task = small_task()
    chosen = fedprior.algorithm(name, task.network, top_k=0.1)
    settings = Settings(**{**task.defaults, "wire": "int8"})
    encoded = build(chosen, task.network, task.data, settings)
    counted = build(chosen, task.network, task.data, Settings(**{**task.defaults, "wire": "int8", "messages": "count"}))
    dense = build(fedprior.algorithm(name, task.network), task.network, task.data, settings)
    for _ in range(3):
        record = encoded.step(evaluate=False)
        assert counted.step(evaluate=False) == record
        assert (
            record["bytes_up"] < dense.step(evaluate=False)["bytes_up"] + 40
        )  # a mask costs something in so small a net
    assert all(set(memory) == {"error"} for memory in encoded.memory.values())


def test_what_is_not_sent_is_remembered() -> None:
    task = small_task()
    sim = build(
        fedprior.algorithm("fedtopk", task.network, top_k=0.1),
        task.network,
        task.data,
        Settings(clients_per_round=4, batch_size=4),
    )
    before = dict(sim.server["weights"])
    sim.step(evaluate=False)
    moved = torch.cat([(sim.server["weights"][name] - value).flatten() for name, value in before.items()])
    assert 0 < int((moved != 0).sum()) <= 4 * round(0.1 * trees.count(before))
    for memory in sim.memory.values():
        left = torch.cat([value.flatten() for value in memory["error"].values()])
        assert int((left == 0).sum()) >= round(0.1 * len(left))


def test_what_makes_no_sense_is_refused() -> None:
    network = small_task().network
    with pytest.raises(SettingError, match="above 0 and at most 1"):
        fedprior.algorithm("fedtopk", network, top_k=0.0)
    with pytest.raises(SettingError, match="give scaffold or top_k"):
        fedprior.algorithm("scaffold", network, top_k=0.1)
