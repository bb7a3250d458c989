"""What happens when numbers overflow, and what attackers do: the state before the round, exactly; the step, by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import fedprior
from fedprior.core import trees
from fedprior.core.errors import DivergedError, SettingError
from fedprior.core.optimisers import Optimiser, TreeOptimiser
from fedprior.core.settings import Settings
from fedprior.core.trees import SMALL, Tree, stack
from fedprior.core.weighting import Share
from fedprior.em import Algorithm, Batch, m_step
from fedprior.em.protocol import finite
from fedprior.engines.attack import ATTACKS, Poisoned, backdoor_success
from fedprior.engines.build import build
from fedprior.engines.loop.round import _check_clients
from fedprior.engines.server_state import update
from fedprior.engines.stacked.joined import Kept
from fedprior.priors import Gaussian

OPTIMISERS = ["SGD(lr=0.1, momentum=0.9)", "Adam(lr=0.1)", "Adamax(lr=0.1)", "Yogi(lr=0.1)"]


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def flat(state: dict) -> dict[str, list | float]:
    return {
        f"{section}/{path}": value.tolist() if isinstance(value, Tensor) else value
        for section, moments in state.items()
        for path, value in moments.items()
    }


# ---------------------------------------------------------------------- the server


@pytest.mark.parametrize("text", OPTIMISERS)
def test_a_diverged_round_leaves_the_server_and_its_moments_unchanged(text: str) -> None:
    """Two good rounds, one that overflows; then the run continues as if it had not happened."""
    optimiser = {"weights": Optimiser.parse(text)}
    algorithm = Algorithm(Gaussian(), optimiser, server=optimiser)
    server: Tree = {"weights": {"a": numbers(1, 2), "b": numbers(3)}}
    good = [stack([{"weights": {"a": numbers(1 + i, 1), "b": numbers(5 - i)}}]) for i in range(3)]
    bad = stack([{"weights": {"a": numbers(math.inf, 1), "b": numbers(2)}}])
    disturbed, plain = (TreeOptimiser(optimiser, server) for _ in range(2))
    states = [server, server]
    for number, uploads in enumerate(good, 1):
        if number == 3:
            before = flat(disturbed.state())
            with pytest.raises(DivergedError, match="server diverged in round 3"):
                update(algorithm, states[0], bad, disturbed, Share(1.0), 3)
            assert flat(disturbed.state()) == before
        states = [
            update(algorithm, state, uploads, mine, Share(1.0), number).server
            for state, mine in zip(states, (disturbed, plain), strict=True)
        ]
        assert flat(disturbed.state()) == flat(plain.state())
    assert [value.tolist() for _, value in trees.leaves(states[0])] == [
        value.tolist() for _, value in trees.leaves(states[1])
    ]


@pytest.mark.parametrize("text", OPTIMISERS)
def test_a_kept_state_does_not_change_with_the_next_step(text: str) -> None:
    """Neither the server's tensors nor the moments that were asked for are the optimiser's own."""
    optimiser = {"weights": Optimiser.parse(text)}
    algorithm = Algorithm(Gaussian(), optimiser, server=optimiser)
    server: Tree = {"weights": {"a": numbers(1, 2), "b": numbers(3)}}
    uploads = stack([{"weights": {"a": numbers(4, 4), "b": numbers(4)}}])
    mine = TreeOptimiser(optimiser, server)
    first = m_step(algorithm, server, uploads, mine)
    kept, moments = {n: v.tolist() for n, v in first["weights"].items()}, mine.state()
    remembered = flat(moments)
    m_step(algorithm, first, uploads, mine)
    assert {n: v.tolist() for n, v in first["weights"].items()} == kept
    assert flat(moments) == remembered
    assert not any(value.requires_grad for _, value in trees.leaves(first))


def test_the_server_steps_from_where_it_was_pruned_and_ships_the_average() -> None:
    """Between two steps the prior may have changed the weights; a step starts from those."""
    optimiser = {"weights": Optimiser("SGD", {"lr": 0.5})}
    algorithm = Algorithm(Gaussian(), optimiser, server=optimiser, average=True)
    server = algorithm.init({"a": numbers(8, 8), "b": numbers(8)})
    mine = TreeOptimiser(optimiser, server)
    uploads = stack([{"weights": {"a": numbers(0, 0), "b": numbers(0)}}])
    server = m_step(algorithm, server, uploads, mine)
    assert server["weights"]["a"].tolist() == [4, 4]
    pruned = {**server, "weights": {"a": numbers(4, 0), "b": numbers(0)}}
    server = m_step(algorithm, pruned, uploads, mine)
    assert server["weights"]["a"].tolist() == [2, 0]
    torch.testing.assert_close(server["average"]["a"], numbers(4 - 2 * 20 / 21, 4 - 4 * 20 / 21))


def test_gradients_and_values_are_matched_by_name() -> None:
    """A gradient in another order of its names moves the same tensors, one optimiser or many tensors joined."""
    for text in OPTIMISERS:
        optimiser = {"weights": Optimiser.parse(text)}
        start = {"weights": {"a": numbers(0, 0), "b": numbers(0, 0)}}
        mine = TreeOptimiser(optimiser, start)
        mine.step({"weights": {"b": numbers(-1, -2), "a": numbers(1, 2)}})
        assert (mine.values["weights"]["a"] < 0).all()
        assert (mine.values["weights"]["b"] > 0).all()
        both = trees.tree_map(lambda leaf: torch.stack([leaf, leaf]), start)
        stacked = TreeOptimiser(optimiser, both, rows=2)
        stacked.step({"weights": {"b": -torch.ones(2, 2).double(), "a": torch.tensor([[1.0, 2], [-1, -2]]).double()}})
        assert stacked.values["weights"]["a"].sign().tolist() == [[-1, -1], [1, 1]]


# ---------------------------------------------------------------------- clients


def result(uploads: Tree, loss: Tensor) -> SimpleNamespace:
    """Of a cohort's result what is checked."""
    return SimpleNamespace(upload=uploads, loss=loss)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["loss", "weights", "thresholds", "scalar"])
def test_a_client_whose_numbers_are_not_finite_is_named(place: str, bad: float) -> None:
    """Wherever the number is: in its loss, or anywhere in its upload while its loss is fine."""
    uploads = {
        "weights": {"a": torch.ones(3, 2, 2)},
        "thresholds": {"a": torch.ones(3, 2)},
        "more": {"n": torch.ones(3)},
    }
    loss = torch.ones(3)
    _check_clients([7, 8, 9], result(uploads, loss), 4, False)
    {"loss": loss, "weights": uploads["weights"]["a"], "thresholds": uploads["thresholds"]["a"]}.get(
        place, uploads["more"]["n"]
    )[1].fill_(bad)
    with pytest.raises(DivergedError, match=r"client 8 diverged in round 4\b"):
        _check_clients([7, 8, 9], result(uploads, loss), 4, False)


def poison(hostile: Tensor, local: Tree, packet: Tree) -> Tree:
    """An attack: hostile clients send infinities."""
    infinite = {name: torch.where(hostile, torch.inf, value) for name, value in local["weights"].items()}
    return {**local, "weights": infinite}


@pytest.mark.parametrize("mode", ["in-turn", "vectorised"])
@pytest.mark.parametrize("messages", ["auto", "count"])
def test_an_upload_that_is_not_finite_never_reaches_the_server(small_task, monkeypatch, mode, messages) -> None:
    """One client sends an infinity although its loss is fine: nothing of the run has changed."""

    monkeypatch.setitem(ATTACKS, "scale", poison)
    task = small_task()
    chosen = fedprior.algorithm("fedavg", task.network, server_optimiser="Adam(lr=0.1)")
    settings = Settings(**{**task.defaults, "clients_per_round": 6, "messages": messages, "seed": 1, "bound": 0.0})
    sim = build(chosen, task.network, task.data, replace(settings, attack="scale", attackers=0.17, mode=mode))
    assert int(sim.hostile.sum()) == 1
    hostile = int(sim.hostile.nonzero()[0])
    before = {path: value.clone() for path, value in trees.leaves(sim.server)}
    engine = fedprior.engines.modes.engine([sim], mode)
    (outcome,) = engine.step(evaluate=False)
    assert isinstance(outcome, DivergedError)
    assert f"client {hostile} diverged in round 1:" in str(outcome)
    assert all(torch.equal(value, before[path]) for path, value in trees.leaves(sim.server))
    assert sim.round == 0
    assert bool(sim.accuracy.isnan().all())


def test_a_diverged_run_keeps_its_state_while_others_continue(small_task, monkeypatch) -> None:
    """Stacked: one run's client sends infinities in the first round only; its state must not move in the second."""

    monkeypatch.setitem(ATTACKS, "scale", poison)
    task = small_task()
    settings = Settings(**{**task.defaults, "clients_per_round": 6, "attack": "scale", "attackers": 0.17, "bound": 0.0})
    sims = [
        build(fedprior.algorithm("fedavg", task.network), task.network, task.data, replace(settings, seed=seed))
        for seed in (0, 1)
    ]
    sims[1].hostile[:] = False
    engine = fedprior.engines.modes.engine(sims, "vectorised")
    before = {path: value.clone() for path, value in trees.leaves(sims[0].server)}
    first = engine.step(evaluate=False)
    assert [isinstance(outcome, DivergedError) for outcome in first] == [True, False]
    for sim in sims:
        sim.attack = None
    middle = {path: value.clone() for path, value in trees.leaves(sims[1].server)}
    second = engine.step(evaluate=False)
    assert [isinstance(outcome, DivergedError) for outcome in second] == [True, False]
    assert all(torch.equal(value, before[path]) for path, value in trees.leaves(sims[0].server))
    assert any(not torch.equal(value, middle[path]) for path, value in trees.leaves(sims[1].server))
    assert [sim.round for sim in sims] == [0, 2]


def test_finite_reduces_over_all_but_the_leading_dimensions() -> None:
    for size in (3, SMALL + 1):
        tree = {"a": {"x": torch.ones(2, 3, size), "y": torch.ones(2, 3)}, "b": {"z": torch.ones(2, 3, 5, 2)}}
        assert finite(tree, 2).tolist() == [[True] * 3] * 2
        for leaf, bad in ((tree["a"]["x"], math.inf), (tree["a"]["y"], math.nan), (tree["b"]["z"], -math.inf)):
            spoiled = leaf[1, 2].clone()
            leaf[1, 2] = bad
            assert finite(tree, 2).tolist() == [[True] * 3, [True, True, False]]
            assert finite({"a": tree["a"], "b": tree["b"]}, 1).tolist() == [True, False]
            leaf[1, 2] = spoiled


def test_only_runs_that_did_not_diverge_get_new_values() -> None:
    values, counts = torch.arange(6.0).reshape(3, 2), torch.arange(3, dtype=torch.int64)
    kept = Kept([values, counts], 3)
    new = [values + 10, counts + 10]
    kept.put(torch.tensor([True, False, True]), new)
    assert values.tolist() == [[10, 11], [2, 3], [14, 15]]
    assert counts.tolist() == [10, 1, 12]


# ---------------------------------------------------------------------- attackers


@pytest.mark.parametrize(
    ("attack", "sent"),
    [("sign-flip", [-19, 33]), ("scale", [201, -297]), ("constant", [1, 1]), ("backdoor", [21, -27])],
)
def test_each_attack_does_what_its_name_says(attack: str, sent: list[float]) -> None:
    """The server sent (1, 3) and the client learned (3, 0): a step of (2, −3)."""
    local, packet = {"weights": {"a": numbers(3, 0)}, "more": {"b": numbers(1)}}, {"weights": {"a": numbers(1, 3)}}
    tampered = ATTACKS[attack](torch.tensor(True), local, packet)
    assert tampered["weights"]["a"].tolist() == sent
    assert tampered["more"] is local["more"]
    honest = ATTACKS[attack](torch.tensor(False), local, packet)
    assert honest["weights"]["a"].tolist() == [3, 0]
    several = {"weights": {"a": torch.stack([numbers(0, 2), numbers(2, 4)])}}
    assert ATTACKS[attack](torch.tensor(True), local, several)["weights"]["a"].tolist() == sent, "against their mean"


def test_a_backdoor_marks_every_second_example_of_hostile_clients() -> None:
    images, labels = torch.zeros(2, 3, 1, 6, 6), torch.full((2, 3), 7)
    one = [Batch(images, labels, None, None)]
    batch = Poisoned(one, torch.tensor([True, False]))[0]
    assert batch.y.tolist() == [[0, 7, 0], [7, 7, 7]]
    assert batch.x.sum((-1, -2, -3)).tolist() == [[16, 0, 16], [0, 0, 0]]
    assert bool((batch.x[0, 0, 0, 2:, 2:] == 1).all()), "the lower right corner"
    alone = Poisoned([Batch(images[0], labels[0], None, None)], torch.tensor(True))
    assert len(alone) == 1
    assert torch.equal(alone[0].x, batch.x[0])
    assert alone[0].y.tolist() == [0, 7, 0]


def test_a_backdoor_succeeds_by_the_marked_images_of_other_classes() -> None:
    x, y = torch.zeros(4, 1, 6, 6), torch.tensor([0, 1, 2, 1])

    def predict(x: Tensor) -> Tensor:  # heeds the mark, but not in the brighter third image
        return torch.stack([x.sum((1, 2, 3)) == 16, x.sum((1, 2, 3)) != 16], 1).double()

    assert backdoor_success(predict, x + torch.tensor([0, 0, 1, 0]).reshape(4, 1, 1, 1), y) == pytest.approx(2 / 3)


def test_a_backdoor_needs_images() -> None:
    task = fedprior.own_task(nn.Linear(3, 2), [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))] * 10)
    with pytest.raises(SettingError, match="marks images of one label each"):
        fedprior.run(task, "fedavg", attack="backdoor", attackers=0.2)


@pytest.mark.parametrize("mode", ["in-turn", "vectorised"])
def test_one_attackers_flipped_step_enters_the_mean(small_task, mode: str) -> None:
    """FedAvg over all clients: the attacker's step counts minus ten times, the others' once."""

    def server(attack: str) -> tuple[dict[str, Tensor], Tensor]:
        task = small_task(dtype=torch.float64)
        hostile = {"bound": 0.0} if attack == "none" else {"attack": attack, "attackers": 1 / 6, "bound": 0.0}
        settings = Settings(
            **{**task.defaults, "clients_per_round": 6, "mode": mode, "seed": 3, "weighting": "equal", **hostile}
        )
        sim = build(fedprior.algorithm("fedavg", task.network), task.network, task.data, settings)
        fedprior.engines.modes.engine([sim], mode).step(evaluate=False)
        return {name: value.clone() for name, value in sim.server["weights"].items()}, sim.hostile

    task = small_task(dtype=torch.float64)
    start = task.network.params()
    (plain, none), (flipped, hostile) = server("none"), server("sign-flip")
    assert (int(none.sum()), int(hostile.sum())) == (0, 1)
    scaled, same = server("scale")
    assert torch.equal(same, hostile)
    for name, w in start.items():
        # mean + (k − 1) step / 6, so that both attacks name the same step.
        step = (plain[name] - flipped[name]) * 6 / 11
        torch.testing.assert_close(scaled[name], plain[name] + 99 * step / 6, rtol=0, atol=1e-9)
        assert float(step.abs().max()) > 1e-4
        assert float((step - (plain[name] - w)).abs().max()) > 1e-6, "one client's step, not the mean's"
