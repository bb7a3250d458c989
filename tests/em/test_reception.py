"""Uploads that are left out: against a naive twin and the same round without them; what a run is worth then."""

import math
import operator
import statistics
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedprior
from fedprior.core import trees
from fedprior.core.errors import FedpriorWarning
from fedprior.core.keys import Turn
from fedprior.core.settings import Settings
from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import Share
from fedprior.em import Algorithm, reception
from fedprior.em.algorithm import RECENT
from fedprior.em.reception import Earlier, one_apart, receive
from fedprior.engines.attack import ATTACKS, Attack
from fedprior.engines.build import build
from fedprior.engines.loop.round import Simulation
from fedprior.engines.modes import engine
from fedprior.engines.server_state import left_out, left_out_often
from fedprior.priors import Gaussian
from small_world import small_clients, small_net

MODES = ["in-turn", "vectorised"]


def simulate(task: fedprior.Task, name: str, mode: str, **given: object) -> Simulation:
    chosen = fedprior.algorithm(name, task.network)
    return build(chosen, task.network, task.data, Settings(**{**task.defaults, "mode": mode, **given}))


def state(sim: Simulation) -> dict[str, Tensor]:
    return {path: value.clone() for path, value in trees.leaves(sim.server) if not path.startswith("usual")}


def moved(by: float) -> Attack:
    """An attack by a multiple of the client's own step."""
    return lambda hostile, local, packet: {
        **local,
        "weights": {
            name: torch.where(hostile, packet["weights"][name] + by * (value - packet["weights"][name]), value)
            for name, value in local["weights"].items()
        },
    }


def filled(number: float) -> Attack:
    """An attack by one number everywhere."""
    return lambda hostile, local, packet: {
        **local,
        "weights": {name: torch.where(hostile, number, value) for name, value in local["weights"].items()},
    }


# ---------------------------------------------------------------------- the rule


def naive(rounds: list[list[float]], bound: float) -> list[tuple[list[bool], list[float]]]:
    """Plain Python: who is kept in each round, and how many times as far as usual each is."""
    medians, found = [], []
    for distances in rounds:
        finite = [d for d in distances if math.isfinite(d)]
        known = [m for m in medians[-RECENT:] if m > 0]
        usual = statistics.median_low(known) if known else statistics.median_low(finite)
        if len(known) < RECENT and finite:
            usual = max(usual, min(statistics.median_low(finite), bound * usual))
        latest = max([statistics.median_low(finite), *medians[-1:]])
        if len(distances) >= 3 and latest > 0:
            usual = min(usual, latest)
        apart = [(d / usual if usual > 0 else 0.0) if math.isfinite(d) else math.inf for d in distances]
        found.append(([a <= bound for a in apart], apart))
        medians.append(statistics.median_low(finite))
    return found


@pytest.mark.parametrize("vectorised", [False, True])
def test_the_rule_is_that_of_plain_python(vectorised: bool) -> None:
    """Distances over twenty rounds, zeros and infinities among them; stacked, beside a run with others."""
    draw = torch.Generator().manual_seed(3)
    rounds = torch.exp(2 * torch.randn(20, 2, 5, generator=draw, dtype=torch.float64))
    rounds[0, :, 3], rounds[4], rounds[5, :, :3] = math.inf, 0.0, 0.0
    rounds[7, 0, :2], rounds[9, 0] = math.nan, 1e40
    algorithm = Algorithm(Gaussian(), {}, bound=3.0)
    start = algorithm.init({"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)})
    own = trees.stack([start, start]) if vectorised else start
    for run in range(2 if vectorised else 1):
        server, expected = own, naive(rounds[:, run].tolist(), 3.0)
        for distances, (kept, apart) in zip(rounds, expected, strict=True):
            distances = distances if vectorised else distances[0]
            # (d, 0) and the scalar 0 are as far from zero as d; so are (0, 0.6 d) and 0.8 d.
            a = torch.stack([distances * 0, 0.6 * distances.nan_to_num(0.0, 0.0) + distances * 0], -1)
            uploads = {"weights": {"a": a, "b": 0.8 * distances}}
            fine = distances.isfinite()
            got = receive(algorithm, server, uploads, Share(0.5), fine, vectorised=vectorised)
            server = {**server, "usual": got.usual}
            mine = (got.apart, got.kept) if not vectorised else (got.apart[run], got.kept[run])
            assert mine[0].tolist() == pytest.approx(apart, rel=1e-12)
            assert mine[1].tolist() == kept
            if not vectorised:
                assert got.uploads["weights"]["b"].tolist() == uploads["weights"]["b"][got.kept].tolist()
                assert got.share.fraction == pytest.approx(0.5 * sum(kept) / 5)


def counts(steps: list[list[float]]) -> list[float]:
    """Plain Python: 2.5 for the steps whose cosines with n ≥ 4 finite others add up to less than −0.3 √n, else 1."""
    units = [[x / math.hypot(*step) for x in step] for step in steps]
    found = []
    for own in units:
        others = [unit for unit in units if unit is not own and math.isfinite(unit[0])]
        cosines = sum(sum(map(operator.mul, own, unit)) for unit in others)
        found.append(2.5 if len(others) >= 4 and cosines < -0.3 * len(others) ** 0.5 else 1.0)
    return found


@pytest.mark.parametrize("vectorised", [False, True])
@pytest.mark.parametrize("cohort", [2, 4, 5, 7])
def test_a_step_against_the_others_counts_more(vectorised: bool, cohort: int) -> None:
    """Long and short steps in six dimensions, a third of them back, one not finite. Four cannot say which is back."""
    draw = torch.Generator().manual_seed(5)
    steps = 0.8 + torch.randn(12, cohort, 6, generator=draw, dtype=torch.float64)
    steps *= torch.exp(torch.randn(12, cohort, 1, generator=draw, dtype=torch.float64)) * 100
    steps *= torch.where(torch.rand(12, cohort, 1, generator=draw) < 0.3, -1.0, 1.0)
    steps[3, 0] = math.nan
    far = [apart for _, apart in naive(steps.norm(dim=2).tolist(), 3.0)]
    times = [counts(given) for given in steps.tolist()]
    algorithm, base = Algorithm(Gaussian(), {}, bound=3.0), torch.arange(6.0, dtype=torch.float64)
    server = algorithm.init({"a": base[:2].clone(), "b": base[2:].reshape(2, 2).clone()})
    for given, apart, more in zip(steps, far, times, strict=True):
        sent = given + base
        uploads = {"weights": {"a": sent[:, :2], "b": sent[:, 2:].reshape(-1, 2, 2)}}
        received = server, uploads, given.isfinite().all(1)
        one, other, fine = trees.stack([received]) if vectorised else received
        got = receive(algorithm, one, other, Share(0.5), fine, vectorised=vectorised)
        found, usual = (got.apart[0], trees.row(got.usual, 0)) if vectorised else (got.apart, got.usual)
        assert found.tolist() == pytest.approx([a * b for a, b in zip(apart, more, strict=True)], rel=1e-9)
        server = {**server, "usual": usual}
    assert (sum(more.count(2.5) for more in times) > 10) == (cohort > 4)


def test_who_is_not_fine_says_nothing_about_directions() -> None:
    """Five honest steps that have nothing in common, one of them long, beside five against it that are not fine."""
    algorithm = Algorithm(Gaussian(), {}, bound=8.0)
    server = algorithm.init({"a": torch.zeros(5, dtype=torch.float64)})
    honest = torch.eye(5, dtype=torch.float64)
    honest[4] *= 4
    uploads = {"weights": {"a": torch.cat([honest, -honest[4:].expand(5, -1)])}}
    got = receive(algorithm, server, uploads, Share(0.5), torch.tensor([True] * 5 + [False] * 5))
    assert got.apart[:5].tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0, 4.0])
    assert got.apart[5:].isinf().all()


def test_one_by_one_a_step_that_is_nearly_zero_has_no_direction() -> None:
    algorithm, earlier = Algorithm(Gaussian(), {}, bound=8.0), Earlier()
    server = algorithm.init({"a": torch.zeros(3)})
    uploads = [{"weights": {"a": torch.tensor([step, 0.0, 0.0])}} for step in (1e-40, 1.0, 1.0, 1e-40)]
    assert max(one_apart(algorithm, server, upload, earlier) for upload in uploads[2:]) <= 1.0


def test_one_by_one_a_step_against_those_before_it_counts_more() -> None:
    """From the fifth on; what is usual is known. Who is not finite or a thousand times too far is one of many."""
    draw = torch.Generator().manual_seed(5)
    steps = 0.5 + torch.randn(40, 6, generator=draw, dtype=torch.float64)
    steps[::5] *= -3
    steps[7] *= 1000
    steps[11] = math.nan
    algorithm = Algorithm(Gaussian(), {}, bound=8.0)
    server = algorithm.init({"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2, 2, dtype=torch.float64)})
    server = {**server, "usual": {"weights": torch.ones(RECENT, dtype=torch.float64)}}
    earlier, expected = Earlier(), []
    found = [
        one_apart(algorithm, server, {"weights": {"a": 1 + step[:2], "b": 1 + step[2:].reshape(2, 2)}}, earlier)
        for step in steps
    ]
    for i, step in enumerate(steps.tolist()):
        more = counts(steps[: i + 1].tolist())[-1]
        expected.append(math.inf if i == 11 else math.hypot(*step) * more)
    assert found == pytest.approx(expected, rel=1e-9)
    assert sum(one > 8 for one in found) > int((steps.norm(dim=1) > 8).sum()) + 1


def test_one_by_one_steps_shrink() -> None:
    """Usual is 4 by eight rounds, and 2 by the last: from the third upload on, 2 counts, and 3 if the others say so."""
    algorithm = Algorithm(Gaussian(), {}, bound=8.0)
    known = torch.tensor([4.0, 4, 5, 4, 4, 3, 3, 2], dtype=torch.float64)
    server = {**algorithm.init({"a": torch.zeros(1, dtype=torch.float64)}), "usual": {"weights": known}}
    given, earlier = [1.0, 20.0, 20.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 20.0], Earlier()
    found = [
        one_apart(algorithm, server, {"weights": {"a": torch.tensor([step], dtype=torch.float64)}}, earlier)
        for step in given
    ]
    assert [step / far for step, far in zip(given, found, strict=True)] == [4, 4, 4, 2, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighting", ["examples", "equal"])
@pytest.mark.parametrize(
    "name", ["fedavg", "fedsparse", "fedmedian", "fedpm", "scaffold", "fedmix", "fedl1", "fedtopk"]
)
def test_a_run_in_which_nothing_is_left_out_is_the_same_to_the_last_bit(small_task, name, weighting, mode) -> None:
    task = small_task()
    sims = [simulate(task, name, mode, weighting=weighting, bound=bound) for bound in (0.0, 1e9)]
    drivers = [engine([sim], mode) for sim in sims]
    for evaluate in (True, False, True):
        one, other = (driver.step(evaluate) for driver in drivers)
        assert str(one) == str(other)  # as text, because nan is not itself
    mine, theirs = (state(sim) for sim in sims)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[path]) for path, value in mine.items())


# ---------------------------------------------------------------------- a round without somebody


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Attack], dict[str, object]]:
    """The settings of a run in which one of six clients makes this attack."""

    def settings(attack: Attack) -> dict[str, object]:
        monkeypatch.setitem(ATTACKS, "scale", attack)
        return {"clients_per_round": 6, "attack": "scale", "attackers": 0.17}

    return settings


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighting", ["examples", "equal"])
@pytest.mark.parametrize("sent", [1000.0, 3e38, math.nan, math.inf])
def test_whoever_is_left_out_counts_as_if_absent(small_task, hostile, mode, weighting, sent) -> None:
    """The new server is the mean of the five others by their examples; the sixth is named, and is not measured."""
    task = small_task(dtype=torch.float64 if mode == "vectorised" and sent == 1000 else torch.float32)
    attacked = hostile(moved(sent) if sent == 1000 else filled(sent))
    sim = simulate(task, "fedavg", mode, weighting=weighting, seed=1, **attacked)
    (bad,) = sim.hostile.nonzero().flatten().tolist()
    (record,) = engine([sim], mode).step(evaluate=True)
    assert [fault["client"] for fault in record["faults"]] == [bad]
    assert sim.accuracy.isnan().nonzero().flatten().tolist() == [bad]
    assert math.isfinite(record["train_loss"])
    assert math.isfinite(record["global_loss"])
    sent_by = 6 if sent == 1000 else 5  # what is not finite, or as good as, is not sent
    assert record["bytes_up"] * 6 == record["bytes_down"] * sent_by
    # The mean of all six without an attack, less what the sixth alone adds to it.
    whole, own = (simulate(task, "fedavg", "in-turn", weighting=weighting, seed=1, clients_per_round=6) for _ in "12")
    whole.step(evaluate=False)
    sizes = torch.tensor(task.data.train.sizes, dtype=torch.float64) if weighting == "examples" else torch.ones(6)
    alone = upload_of(own, bad)
    part = float(sizes[bad] / sizes.sum())
    for name, value in whole.server["weights"].items():
        expected = (value.double() - part * alone[name].double()) / (1 - part)
        torch.testing.assert_close(sim.server["weights"][name].double(), expected, rtol=0, atol=1e-5)


def upload_of(sim: Simulation, client: int) -> Params:
    """What a client sends in the first round."""
    turn = Turn(sim.root, 1).of(torch.tensor([client]))
    server = sim.algorithm.prior.prune(sim.server)
    _, packets, _, _ = sim._speak(server, turn)
    step, _ = sim._take_turns([client], packets, Turn(sim.root, 1), 1.0)
    return {name: value[0] for name, value in step.upload["weights"].items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["fedavg", "fedsparse", "fedadam"])
def test_a_round_in_which_nobody_counts_changes_nothing(small_task, hostile, monkeypatch, mode, name) -> None:
    """One client, that is usual for two rounds and hostile in the third: weights and moments stay, and it is named."""
    task = small_task((6,))
    calls = iter([1.0, 1.0, 1000.0, 1.0])
    attacked = {**hostile(lambda *given: moved(next(calls))(*given)), "clients_per_round": 1, "attackers": 0.9}
    sim = simulate(task, name, mode, **attacked)
    driver = engine([sim], mode)
    for _ in range(2):
        (record,) = driver.step(evaluate=True)
        assert "faults" not in record
    driver.sync()
    before, moments = state(sim), trees.clone(sim.optimiser.state()) if sim.optimiser else {}
    (record,) = driver.step(evaluate=True)
    driver.sync()
    assert [fault["client"] for fault in record["faults"]] == [0]
    assert sim.round == 3
    assert all(torch.equal(value, before[path]) for path, value in state(sim).items() if path.startswith("weights"))
    after = dict(trees.leaves(sim.optimiser.state() if sim.optimiser else {}))
    for path, value in trees.leaves(moments):
        assert torch.equal(torch.as_tensor(after[path]), torch.as_tensor(value)), path
    (record,) = driver.step(evaluate=True)
    assert "faults" not in record
    assert any(not torch.equal(value, before[path]) for path, value in state(sim).items())


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_knows_what_is_usual(small_task, hostile, tmp_path, mode) -> None:
    """A cohort of one: only earlier rounds, of an earlier process, can tell that this one's distance is not usual."""
    chosen = {**hostile(moved(1.0)), "clients_per_round": 1, "attackers": 0.9, "mode": mode, "rounds": 4}
    first = fedprior.run(small_task((6, 6)), "fedavg", out=tmp_path / "run", **chosen)
    assert not any("faults" in record for record in first.records)
    hostile(moved(1000.0))
    records = fedprior.resume(tmp_path / "run", task=small_task((6, 6)), rounds=5).records
    assert len(records[-1]["faults"]) == 1


def test_a_checkpoint_without_distances_is_taken(small_task, tmp_path) -> None:
    """One of a version that kept none, whose config has no bound either: it goes on as it began."""
    folder = tmp_path / "run"
    fedprior.run(small_task(), "fedavg", out=folder, rounds=2, bound=0.0)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("bound = 0.0\n", ""))
    assert "bound" not in config.read_text()
    resumed = fedprior.resume(folder, task=small_task(), rounds=3)
    assert resumed.simulation.settings.bound == 0
    config.write_text(config.read_text().replace("[run]\n", "[run]\nbound = 8.0\n"))
    with pytest.warns(FedpriorWarning, match=r"from round 4 on, bound = 8.0, before 0.0$"):
        assert fedprior.resume(folder, task=small_task(), rounds=4).summary["rounds"] == 4


def received(algorithm: Algorithm, server: Tree, uploads: Tree) -> Tensor:
    fine = torch.ones(len(next(trees.leaves(uploads))[1]), dtype=torch.bool)
    return receive(algorithm, server, uploads, Share(1.0), fine).apart


def test_what_was_not_sent_is_not_far_away(small_task) -> None:
    """Of one client only the first unit of each layer is open: its other weights are zero, and the server's are not."""
    task = small_task()
    algorithm = replace(fedprior.algorithm("feddrop", task.network), bound=8.0)
    server = algorithm.init({name: value + 100 for name, value in task.network.params().items()})
    gates = {layer: torch.ones(3, *shape) for layer, shape in algorithm.prior.gating.gate_shapes.items()}
    for gate in gates.values():
        gate[1, 1:] = 0
    masks = torch.func.vmap(algorithm.prior.gating.mask)(gates)
    # Every number that is sent is off by one.
    weights = {name: (value + 1).expand(3, *value.shape) for name, value in server["weights"].items()}
    sent = {name: value * masks.get(name, torch.ones(())) for name, value in weights.items()}
    count = sum(int((value[1] != 0).sum()) for value in sent.values())
    total = sum(value[0].numel() for value in sent.values())
    assert count < total / 2
    apart = received(algorithm, server, {"weights": sent, "gates": gates})
    assert apart.tolist() == pytest.approx([1, (count / total) ** 0.5, 1], rel=1e-4)


def test_a_mixture_is_as_far_as_its_nearest_model(small_task) -> None:
    """Beside the first model, beside the last one, and three times as far from that."""
    task = small_task()
    algorithm = replace(fedprior.algorithm("fedmix", task.network), bound=8.0)
    server = algorithm.init(task.network.params())
    offsets = 100.0 * torch.arange(len(next(iter(server["weights"].values()))))
    models = {
        name: offsets.reshape(-1, *[1] * (value.dim() - 1)).expand(value.shape)
        for name, value in server["weights"].items()
    }
    sent = {name: torch.stack([value[0] + 1, value[-1] + 1, value[-1] - 3]) for name, value in models.items()}
    apart = received(algorithm, {**server, "weights": models}, {"weights": sent})
    assert apart.tolist() == pytest.approx([1, 1, 3])


def test_statistics_of_who_is_left_out_do_not_count(hostile) -> None:
    """A network with BatchNorm, in turn, where rows are dropped, and stacked, where they weigh nothing."""
    clients = small_clients((6, 6, 6, 6, 6, 6), dtype=torch.float64)
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4)).double()
    task = fedprior.own_task(module, clients, batch_size=3, device="cpu")
    chosen = {**hostile(moved(1000.0)), "rounds": 3}
    alone, stacked = (simulate(task, "fedavg", mode, **chosen) for mode in MODES)
    drivers = engine([alone], "in-turn"), engine([stacked], "vectorised")
    for _ in range(3):
        (one,), (other,) = (driver.step(evaluate=False) for driver in drivers)
        assert len(one["faults"]) == len(other["faults"]) == 1
    for path, value in trees.leaves(stacked.server):
        torch.testing.assert_close(value, dict(trees.leaves(alone.server))[path], rtol=0, atol=1e-9)


# ---------------------------------------------------------------------- what it is worth


def digits() -> fedprior.Task:
    """Ten devices with forty digits of mnist-mini each, and a small network."""
    whole = fedprior.task("mnist-mini").data
    test_x, test_y = whole.test_x[:400, :, ::2, ::2], whole.test_y[:400]
    clients = [
        (whole.x[i : i + 40, :, ::2, ::2], whole.y[i : i + 40], test_x[i : i + 40], test_y[i : i + 40])
        for i in range(0, 400, 40)
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(196, 24), nn.ReLU(), nn.Linear(24, 10))
    return fedprior.own_task(module, clients, batch_size=10, device="cpu")


@pytest.mark.parametrize("name", ["fedavg", "fedsparse"])
def test_one_of_ten_devices_cannot_spoil_a_run(name, hostile) -> None:
    """×1000, sign-flipped and 3e38 in every round: within three points of the run without it, and the device is named.

    The attack `sign-flip` is ten times the step back. A step back of the usual length passes; a tenth of them does no
    harm.
    """
    task = digits()
    chosen = fedprior.algorithm(name, task.network, local_optimiser="SGD(lr=0.1)")
    common = {"rounds": 15, "evaluate_every": 15, "clients_per_round": 10, "mode": "vectorised"}
    clean = fedprior.run(task, chosen, **common)
    assert clean.summary["global_accuracy"] > 0.75
    assert not any("faults" in record for record in clean.records)
    for attack, seen in ((moved(1000.0), True), (filled(3e38), True), (moved(-10.0), True), (moved(-1.0), False)):
        found = fedprior.run(task, chosen, **{**hostile(attack), **common, "attackers": 0.1})
        assert found.summary["global_accuracy"] > clean.summary["global_accuracy"] - 0.03
        bad = int(found.simulation.hostile.nonzero())
        named = [[fault["client"] for fault in record.get("faults", ())] for record in found.records]
        assert named == [[bad] if seen else []] * 15


# ---------------------------------------------------------------------- what an independent reader found


def test_the_first_to_arrive_is_not_its_own_measure(small_task) -> None:
    """In a young run, one by one: against the whole cohort at once."""
    algorithm = replace(fedprior.algorithm("fedavg", small_task().network), bound=8.0)
    server = algorithm.init(small_task().network.params())
    count, known = trees.count(server["weights"]), torch.zeros(RECENT, dtype=torch.float64)
    known[-3:] = 1.0
    server = {**server, "usual": {"weights": known}}
    away = [60.0, 1.0, 1.0, 1.0, 1.0]
    uploads = [{"weights": {k: v + d / count**0.5 for k, v in server["weights"].items()}} for d in away]
    earlier = Earlier()
    found = [one_apart(algorithm, server, upload, earlier) for upload in uploads]
    together = receive(algorithm, server, trees.stack(uploads), Share(1.0), torch.ones(5, dtype=torch.bool))
    assert found == pytest.approx(together.apart.tolist(), rel=1e-3)
    assert together.kept.tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("optimiser", ["Adam(lr=0.01)", "SGD(lr=1.0, momentum=0.9)"])
def test_a_first_round_in_which_nobody_counts_leaves_no_moments(small_task, monkeypatch, optimiser) -> None:
    """One client is too far away in its weights, the other in its control variates; the next rounds are sound."""
    measured, number = reception.distances, [0]

    def far(algorithm: Algorithm, uploads: Tree, server: Tree) -> tuple[Params, Tensor | None]:
        number[0] += 1
        apart = torch.tensor([1e3, 1.0], dtype=torch.float64)
        found, products = measured(algorithm, uploads, server)
        if number[0] == 1:
            found = {k: v * (apart if k == "weights" else apart.flip(0)) for k, v in found.items()}
        return found, products

    monkeypatch.setattr(reception, "distances", far)
    states = []
    for mode in MODES:
        number[0] = 0
        task = small_task((6, 6))
        chosen = fedprior.algorithm("scaffold", task.network, server_optimiser=optimiser)
        settings = Settings(**{**task.defaults, "clients_per_round": 2, "mode": mode})
        sim = build(chosen, task.network, task.data, settings)
        driver = engine([sim], mode)
        for _ in range(3):
            (record,) = driver.step(evaluate=False)
            assert isinstance(record, dict)
        states.append(state(sim))
    for path, value in states[0].items():
        torch.testing.assert_close(states[1][path], value, rtol=1e-4, atol=1e-5)


def test_a_run_that_stands_still_says_so() -> None:
    task = fedprior.own_task(small_net(), small_clients((2, 1500)), batch_size=2, device="cpu")
    scaffold = fedprior.algorithm("scaffold", task.network, local_optimiser="SGD(lr=0.1)")
    with pytest.warns(FedpriorWarning, match="last 3 rounds every upload was left out.*bound=8") as said:
        result = fedprior.run(task, scaffold, rounds=8, clients_per_round=2)
    assert sum("stands still" in str(one.message) for one in said) == 1
    assert all(len(record["faults"]) == 2 for record in result.records)


def test_a_large_client_that_is_left_out_again_and_again_is_named_once_with_its_size() -> None:
    task = fedprior.own_task(small_net(), small_clients((1200, 4, 4, 4)), batch_size=4, device="cpu")
    with pytest.warns(
        FedpriorWarning, match="client 0 was left out in 3 rounds.*has 1,200 .* others have 4, .*above 8"
    ) as said:
        result = fedprior.run(task, "fedavg", rounds=6, clients_per_round=4)
    assert sum("examples" in str(one.message) for one in said) == 1
    assert all([fault["client"] for fault in record["faults"]] == [0] for record in result.records[1:])
    far = [{"client": 0, "what": "it counts as 9 times as far"}]
    overflown = left_out([0], [math.inf], 8.0)
    assert left_out_often([{"faults": far}] * 3) == [0]
    assert left_out_often([{"faults": overflown}] * 3) == []  # a larger bound does not help
    with warnings.catch_warnings():  # an attacker among equals is in the record, and no surprise
        warnings.simplefilter("error", FedpriorWarning)
        fedprior.run(
            fedprior.own_task(small_net(), small_clients((8,) * 5), batch_size=4, device="cpu"),
            "fedavg",
            rounds=6,
            clients_per_round=5,
            attack="scale",
            attackers=0.2,
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["fedavg", "fedtopk", "feddrop"])
def test_a_clip_and_top_k_compose(small_task, name, mode) -> None:
    """An upload that is too far away moves the server by the clip: what was not sent is not far away."""
    task, clip = small_task((6, 6)), 0.01
    more = {} if name == "fedtopk" else {"top_k": 0.3}
    sim = build(
        fedprior.algorithm(name, task.network, **more),
        task.network,
        task.data,
        Settings(**{**task.defaults, "clients_per_round": 1, "clip": clip, "mode": mode}),
    )
    before = state(sim)
    engine([sim], mode).step(evaluate=False)
    moved = [value - before[path] for path, value in state(sim).items() if path.startswith("weights/")]
    assert float(torch.cat([part.flatten() for part in moved]).norm()) == pytest.approx(clip, rel=1e-3)
