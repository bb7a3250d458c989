"""A clip that follows a quantile: the update, its noise and what it costs, and whole runs in both engines."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedprior
from fedprior.core import keys, trees
from fedprior.core.errors import FedpriorWarning, SettingError
from fedprior.core.settings import Settings
from fedprior.core.trees import Tree
from fedprior.em.guard import Guard
from fedprior.engines.build import build
from fedprior.engines.loop.round import Simulation
from fedprior.engines.privacy import Accountant, check_guard
from fedprior.engines.stacked.together import Together

D = torch.float64


def uploads_at(distances: list[float] | Tensor, size: int = 3) -> Tree:
    """One upload at each distance from zero, all in one direction."""
    away = torch.as_tensor(distances, dtype=D)
    return {"weights": {"a": away[:, None] * torch.full((1, size), size**-0.5, dtype=D)}}


def server_with(guard: Guard, size: int = 3) -> Tree:
    like = torch.zeros(size, dtype=D)
    return {"weights": {"a": like}, **guard.init(like)}


def next_clip(guard: Guard, distances: list[float] | Tensor, server: Tree, seed: int = 0, **how: bool) -> float:
    return float(guard(uploads_at(distances), {}, server, keys.key(seed), **how)[1]["clip"]["norm"])


# ---------------------------------------------------------------------- the update
@settings(max_examples=30)
@given(
    st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=7), min_size=1, max_size=5),
    st.floats(0.1, 5),
    st.floats(0.05, 0.95),
    st.sampled_from([None, 2.0, 5.0]),
)
def test_without_noise_it_is_the_formula(rounds: list, clip: float, quantile: float, expected: float | None) -> None:
    """C ← C exp(−0.2 (b − γ)); b is the share of those within C or, in private, Σ (1[within] − 1/2) / E + 1/2."""
    guard = Guard(clip, 0.0, expected, quantile)
    server = server_with(guard)
    for distances in rounds:
        used = float(server["clip"]["norm"])
        reached = uploads_at(distances)["weights"]["a"].norm(dim=1)
        if bool((reached / used - 1).abs().lt(1e-9).any()):
            return  # the last bit would decide
        found, server = guard(uploads_at(distances), {}, server, keys.key(0))
        within = int((reached <= used).sum())
        share = within / len(distances)
        if expected is not None:
            share = 0.5 + (within - len(distances) / 2) / expected
        clip *= math.exp(-0.2 * (share - quantile))
        assert float(server["clip"]["norm"]) == pytest.approx(clip, rel=1e-9)
        fixed, _ = Guard(used, 0.0, expected)(uploads_at(distances), {}, server_with(guard), keys.key(0))
        torch.testing.assert_close(found["weights"]["a"], fixed["weights"]["a"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sign", [0, 3])
def test_one_client_more_moves_the_count_by_a_half(sign: int) -> None:
    """This is the sensitivity that the noise of the count is for: ± 1/2, wherever the client is."""
    guard = Guard(1.0, 0.1, 4.0, 0.3)
    server, cohort = server_with(guard), [0.5, 2.0, 0.1]
    logs = [math.log(next_clip(guard, one, server)) for one in (cohort, [*cohort, float(sign)])]
    assert logs[1] - logs[0] == pytest.approx((0.2 if sign else -0.2) * 0.5 / 4, abs=1e-12)


def test_nobody_and_nan_do_not_count() -> None:
    for expected in (None, 4.0):
        guard = Guard(1.0, 0.0, expected, 0.3)
        server = server_with(guard)
        assert next_clip(guard, [0.5, math.nan], server) == next_clip(guard, [0.5], server)
    assert next_clip(guard, [0.0], server, nobody=True) == pytest.approx(math.exp(-0.2 * (0.5 - 0.3)))
    assert next_clip(guard, [0.0], server) < next_clip(guard, [0.0], server, nobody=True)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("start", [0.1, 10.0])
def test_it_reaches_the_quantile_of_a_population(quantile: float, start: float) -> None:
    """Log-normal distances, Poisson cohorts, noise; from ten times too small, and from ten times too large."""
    draw = torch.Generator().manual_seed(1)
    population = torch.randn(4000, dtype=D, generator=draw).mul(0.5).exp()
    true = float(population.quantile(quantile))
    guard = Guard(start * true, 0.5, 100.0, quantile)
    server, late = server_with(guard), []
    for number in range(200):
        clients = keys.each_with(keys.key(number), len(population), 100 / len(population))
        _, server = guard(uploads_at(population[clients]), {}, server, keys.key(1000 + number))
        late += [float(server["clip"]["norm"])] if number >= 120 else []
    assert math.exp(sum(map(math.log, late)) / len(late)) == pytest.approx(true, rel=0.06)


# ---------------------------------------------------------------------- its share of the budget
@pytest.mark.parametrize(("noise", "expected"), [(0.5, 200.0), (1.0, 30.0), (0.9, 10.0)])
def test_both_noises_together_are_those_of_the_multiplier(noise: float, expected: float) -> None:
    guard = Guard(1.0, noise, expected, 0.5)
    assert guard.of_count == expected / 20
    assert guard.of_sum > noise
    assert guard.of_sum**-2 + (2 * guard.of_count) ** -2 == pytest.approx(noise**-2)
    assert Guard(1.0, noise, expected).of_sum == noise


def test_the_noise_is_that_of_the_sum_and_of_the_count() -> None:
    """On the mean z_Δ C / E, on the share σ / E, and neither says anything about the other."""
    guard, rounds, size = Guard(0.3, 0.9, 10.0, 0.5), 2000, 8
    server, uploads = server_with(guard, size), uploads_at([0.1] * 7, size)
    found = [guard(uploads, {}, server, keys.key(seed)) for seed in range(rounds)]
    sums = torch.stack([one["weights"]["a"].mean(0) for one, _ in found]) - 0.7 * uploads["weights"]["a"][0]
    logs = torch.stack([after["clip"]["norm"].log() for _, after in found])
    shares = 0.5 - (logs - math.log(0.3)) / 0.2
    assert float(sums.std()) == pytest.approx(guard.of_sum * 0.3 / 10, rel=0.02)
    assert guard.of_sum == pytest.approx(0.9 / math.sqrt(1 - 0.81))
    assert float(shares.mean()) == pytest.approx(0.5 + 3.5 / 10, abs=4 * 0.05 / math.sqrt(rounds))
    assert float(shares.std()) == pytest.approx(1 / 20, rel=0.05)
    draws = torch.cat([sums, shares[:, None] - shares.mean()], 1)
    for one in (draws, draws.square()):  # Box and Muller's numbers share a radius, if they share a key
        assert float((torch.corrcoef(one.T) - torch.eye(size + 1, dtype=D)).abs().max()) < 0.1


def delta_of(epsilon: float, rate: float, shift: tuple[float, float]) -> float:
    """δ of a Poisson-sampled pair of sums with unit noise, in which a client moves both by `shift`: a plain integral
    over the plane of what (P − e^ε Q) has above zero, with the client and without it."""
    line = torch.arange(-9.0, 12.0, 0.02, dtype=D)

    def normal(mean: float) -> Tensor:
        return (-0.5 * (line - mean) ** 2).exp() / math.sqrt(2 * math.pi)

    without = normal(0)[:, None] * normal(0)
    with_it = (1 - rate) * without + rate * normal(shift[0])[:, None] * normal(shift[1])
    pairs = ((with_it, without), (without, with_it))
    return max(float((one - math.exp(epsilon) * other).clamp(min=0).sum()) * 0.02**2 for one, other in pairs)


@pytest.mark.parametrize(("rate", "noise", "expected", "delta"), [(0.1, 0.9, 12.0, 1e-5), (1.0, 2.0, 22.0, 1e-3)])
def test_a_round_costs_what_the_accountant_says(rate: float, noise: float, expected: float, delta: float) -> None:
    pytest.importorskip("dp_accounting")
    guard = Guard(1.0, noise, expected, 0.5)
    shift = (1 / guard.of_sum, 0.5 / guard.of_count)
    epsilon = Accountant(rate, noise, delta).total(1)
    assert delta_of(epsilon, rate, shift) <= delta
    assert delta_of(0.99 * epsilon, rate, shift) > delta
    assert delta_of(epsilon, rate, (1 / noise, 0.5 / guard.of_count)) > delta, "the count is not free"


def test_rounds_cost_what_the_package_says_of_both_sums() -> None:
    """The moments accountant takes a Poisson-sampled pair of Gaussian mechanisms as it is."""
    dp = pytest.importorskip("dp_accounting")
    guard = Guard(1.0, 0.8, 60.0, 0.5)
    both = dp.ComposedDpEvent([dp.GaussianDpEvent(guard.of_sum), dp.GaussianDpEvent(2 * guard.of_count)])
    events = [dp.PoissonSampledDpEvent(0.05, one) for one in (both, dp.GaussianDpEvent(0.8))]
    pair, single = (dp.rdp.RdpAccountant().compose(event, 100).get_epsilon(1e-5) for event in events)
    assert pair == pytest.approx(single, rel=1e-9)
    assert Accountant(0.05, 0.8, 1e-5).total(100) < pair < 1.3 * Accountant(0.05, 0.8, 1e-5).total(100)


# ---------------------------------------------------------------------- whole runs
def simulate(task: fedprior.Task, name: str = "fedavg", own: dict | None = None, **settings: object) -> Simulation:
    chosen = fedprior.algorithm(name, task.network, **(own or {}))
    given = {"clients_per_round": 3, "batch_size": 4, "device": "cpu", **settings}
    return build(chosen, task.network, task.data, Settings(**given))


@pytest.mark.parametrize(
    ("name", "own", "more"),
    [
        ("fedavg", {}, {"attack": "scale", "attackers": 0.2}),
        ("fedsparse", {"lambda0": 1e-3}, {"bound": 0.0}),
        ("fedmedian", {}, {}),
    ],
)
def test_engines_agree_without_privacy(name: str, own: dict, more: dict, small_task) -> None:
    task = small_task(dtype=D)
    chosen = {"clip": 0.02, "clip_quantile": 0.6, **more}
    alone, together = (simulate(task, name, own, **chosen) for _ in "ab")
    engine, clips = Together([together]), []
    for _ in range(4):
        (found,), expected = engine.step(evaluate=True), alone.step(evaluate=True)
        assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)
        clips.append(found["clip"])
    engine.sync()
    for (path, one), (_, other) in zip(trees.leaves(together.server), trees.leaves(alone.server), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9, check_dtype=False, msg=path)
    assert clips[0] == 0.02
    assert len(set(clips)) > 1


def test_stacked_runs_have_clips_of_their_own(small_task) -> None:
    tasks = [small_task(dtype=D) for _ in "ab"]
    chosen = {"clip": 0.1, "clip_quantile": 0.6}
    alone, stacked = ([simulate(task, **chosen, seed=seed) for seed, task in enumerate(tasks)] for _ in "ab")
    engine = Together(stacked)
    for _ in range(5):
        found, expected = engine.step(evaluate=False), [run.step(evaluate=False) for run in alone]
        assert [one["clip"] for one in found] == pytest.approx([one["clip"] for one in expected], rel=1e-9)
    assert found[0]["clip"] != pytest.approx(found[1]["clip"], rel=1e-3)


def test_a_private_run_without_clients_that_move_has_no_noise_in_the_end(small_task) -> None:
    """The clip follows the uploads, here to nothing, and the noise follows the clip."""
    pytest.importorskip("dp_accounting")
    still = {"local_optimiser": "SGD(lr=1e-30)"}
    given = {"noise_multiplier": 0.2, "clip": 2.0, "clients_per_round": 6}
    sim, fixed = (simulate(small_task(), own=still, clip_quantile=quantile, **given) for quantile in (0.5, None))
    assert sim.accountant is fixed.accountant, "and it costs nothing more"
    sim.accountant = fixed.accountant = None
    records = [sim.step(evaluate=False) for _ in range(40)]
    assert records[0]["clip"] == 2
    assert records[-1]["clip"] == pytest.approx(2 * math.exp(-0.2 * 0.5 * 39), rel=0.3)
    assert "clip" not in fixed.step(evaluate=False)


def test_nothing_more_travels(small_task) -> None:
    plain, adaptive = (simulate(small_task(), clip=0.1, clip_quantile=quantile) for quantile in (None, 0.5))
    for name in ("bytes_up", "bytes_down"):
        assert plain.step(evaluate=False)[name] == adaptive.step(evaluate=False)[name]
    server = adaptive.server
    layouts = [adaptive.algorithm.downlink(server), adaptive.algorithm.uplink(server)]
    assert all(set(layout.sections) == {"weights"} for layout in layouts)
    assert "clip" not in adaptive.algorithm.broadcast(server, keys.key(0))


@pytest.mark.parametrize(
    "more",
    [{"noise_multiplier": 0.15, "clients_per_round": 3}, {"mode": "in-turn"}, {"mode": "vectorised"}],
    ids=["private", "in-turn", "vectorised"],
)
def test_a_run_that_was_broken_off_has_the_same_clips(more: dict, small_task, tmp_path: Path) -> None:
    if "noise_multiplier" in more:
        pytest.importorskip("dp_accounting")
    given = {"clip": 0.1, "clip_quantile": 0.5, "rounds": 5, "checkpoint_every": 1, **more}
    whole = fedprior.run(small_task(), "fedavg", **given, out=tmp_path / "whole")
    broken = fedprior.run(
        *(small_task(), "fedavg"),
        **given,
        out=tmp_path / "broken",
        progress=lambda r: r["round"] == 2 and fedprior.STOP,
    )
    assert len(broken.records) == 2
    resumed = fedprior.resume(tmp_path / "broken", task=small_task())
    assert resumed.records == whole.records
    assert len({record["clip"] for record in whole.records}) > 2


# ---------------------------------------------------------------------- what is refused
def test_a_count_that_would_take_the_whole_budget_is_refused(small_task) -> None:
    task = small_task()
    chosen = fedprior.algorithm("fedavg", task.network)
    words = r"below clients_per_round / 10 = 0\.3, and it is 0\.3: take more clients_per_round"
    with pytest.raises(SettingError, match=words) as caught:
        check_guard(Settings(noise_multiplier=0.3, clients_per_round=3, clip_quantile=0.5), chosen, task.network)
    assert "\n" not in str(caught.value)
    for fine in ({"noise_multiplier": 0.29}, {"noise_multiplier": 0.0}, {"clip": 1.0}):
        check_guard(Settings(clients_per_round=3, clip_quantile=0.5, **fine), chosen, task.network)
    check_guard(Settings(clients_per_round=3, noise_multiplier=0.3), chosen, task.network)


def test_a_run_says_once_when_the_count_is_dear(small_task) -> None:
    """z_Δ = 0.2 / √(1 − (0.2 / 0.3)²); with 0.1 it is 1.06 times z."""
    pytest.importorskip("dp_accounting")
    given = {"clients_per_round": 3, "rounds": 2, "clip_quantile": 0.5}
    with pytest.warns(
        FedpriorWarning, match=r"is 0\.268 times the clip instead of 0\.2: counting in cohorts of 3"
    ) as said:
        fedprior.run(small_task(), "fedavg", **given, noise_multiplier=0.2)
    assert len(said) == 1
    fedprior.run(small_task(), "fedavg", **given, noise_multiplier=0.1)
    fedprior.run(small_task(), "fedavg", **given, clip=1.0)


@pytest.mark.parametrize("name", ["fedmix", "scaffold"])
def test_it_needs_a_distance_as_a_fixed_clip_does(name: str, small_task) -> None:
    task = small_task()
    chosen = fedprior.algorithm(name, task.network)
    with pytest.raises(SettingError, match="clip is the distance of an upload's weights, but"):
        check_guard(Settings(clip=1.0, clip_quantile=0.5), chosen, task.network)
