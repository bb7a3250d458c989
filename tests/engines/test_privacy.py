"""Clipped and noised uploads: the mechanism against plain loops, whole runs, and what does not compose."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedprior
from fedprior.core import keys, trees
from fedprior.core.errors import SettingError
from fedprior.core.settings import Settings
from fedprior.em import protocol
from fedprior.em.guard import Guard
from fedprior.engines.build import build
from fedprior.engines.loop.round import Simulation
from fedprior.engines.privacy import check_guard
from fedprior.engines.stacked.together import Together

D = torch.float64


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=D)


# ---------------------------------------------------------------------- the mechanism
@given(
    st.lists(st.tuples(*[st.floats(-1e6, 1e6)] * 3), min_size=1, max_size=6),
    st.tuples(*[st.floats(-1e3, 1e3)] * 3),
    st.floats(1e-3, 1e4),
)
def test_an_upload_is_as_a_whole_no_farther_than_the_clip(rows: list, centre: tuple, clip: float) -> None:
    sent, known = torch.tensor(rows, dtype=D), numbers(*centre)
    uploads = {"weights": {"a": sent[:, :2].clone(), "b": sent[:, 2:].clone()}}
    server = {"weights": {"a": known[:2], "b": known[2:]}}
    found = Guard(clip)(uploads, {}, server, keys.key(0))[0]["weights"]
    for row, one in zip(sent, torch.cat([found["a"], found["b"]], 1), strict=True):
        away = row - known
        if float(away.norm()) <= clip:
            assert torch.equal(one, row), "bit for bit"
        else:
            torch.testing.assert_close(one - known, away * clip / away.norm(), rtol=1e-9, atol=1e-9)


def test_what_was_not_sent_is_no_distance() -> None:
    """A gate that is closed leaves zeros in an upload, and the server's weight may be anything."""
    uploads, server = (
        {"weights": {"a": torch.tensor([[3.0, 0.0], [0.0, 4.0]])}},
        {"weights": {"a": torch.tensor([0.0, 9.0])}},
    )
    found = Guard(1.5)(uploads, {"a": torch.tensor([[1.0, 0.0], [1.0, 1.0]])}, server, keys.key(0))[0]["weights"]["a"]
    assert found[0].tolist() == [1.5, 9.0]
    assert found[1].tolist() == [0.0, 7.5]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_one_client_more_moves_the_mean_by_the_clip_over_the_expected_number(count: int) -> None:
    """This is the sensitivity that the noise is for, however many come and whatever they send."""
    guard, server = Guard(0.5, 2.0, 4), {"weights": {"a": torch.zeros(50, dtype=D)}}
    draw = torch.Generator().manual_seed(count)
    sent = (
        torch.randn(count + 1, 50, dtype=D, generator=draw) * 10 ** torch.linspace(-3, 3, count + 1, dtype=D)[:, None]
    )
    means = [
        guard({"weights": {"a": part.clone()}}, {}, server, keys.key(7))[0]["weights"]["a"].mean(0)
        for part in (sent, sent[:-1])
    ]
    expected = sent[-1] * min(1.0, 0.5 / float(sent[-1].norm())) / 4
    torch.testing.assert_close(means[0] - means[1], expected, rtol=0, atol=1e-12)


def test_the_noise_is_that_of_the_clipped_sum() -> None:
    """n ~ N(0, z² C²) on the sum, so z C / E on the mean, independent from weight to weight and round to round."""
    guard, count = Guard(0.3, 1.7, 20), 200_000
    server = {"weights": {"a": torch.zeros(count, dtype=D), "b": torch.zeros(count, dtype=D)}}
    uploads = trees.stack([server] * 5)
    found = [guard(uploads, {}, server, keys.key(seed))[0]["weights"] for seed in (0, 1)]
    draws = torch.stack([one[name].mean(0) for one in found for name in ("a", "b")])
    size = 1.7 * 0.3 / 20
    torch.testing.assert_close(draws.std(1) / size, torch.ones(4, dtype=D), rtol=0, atol=0.006)
    assert float(draws.mean(1).abs().max()) < 4 * size / math.sqrt(count)
    assert float((torch.corrcoef(draws) - torch.eye(4, dtype=D)).abs().max()) < 0.01


def test_normal_numbers_are_normal() -> None:
    draws = keys.normal(keys.key(3), (400, 500)).flatten()
    normal = torch.distributions.Normal(0.0, 1.0)
    for x in (-3.0, -2.0, -1.0, 0.0, 0.5, 1.5, 2.5):
        p = float(normal.cdf(torch.tensor(x)))
        assert float((draws < x).double().mean()) == pytest.approx(p, abs=4.5 * math.sqrt(p * (1 - p) / 2e5))


def test_each_client_is_drawn_apart_from_all_others() -> None:
    drawn = [set(keys.each_with(keys.key(seed), 40, 0.3)) for seed in range(4000)]
    often = torch.tensor([sum(client in one for one in drawn) for client in range(40)]) / 4000
    assert float((often - 0.3).abs().max()) < 4.5 * math.sqrt(0.21 / 4000)
    sizes = torch.tensor([float(len(one)) for one in drawn])
    assert float(sizes.var()) == pytest.approx(40 * 0.21, rel=0.1), "a binomial number"
    assert keys.each_with(keys.key(0), 5, 1.0) == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------- whole runs
def simulate(task: fedprior.Task, name: str = "fedavg", own: dict | None = None, **settings: object) -> Simulation:
    chosen = fedprior.algorithm(name, task.network, **(own or {}))
    given = {"clients_per_round": 3, "batch_size": 4, "device": "cpu", **settings}
    return build(chosen, task.network, task.data, Settings(**given))


ALIKE = {
    "mean": ("fedavg", {}),
    "pulled": ("fedprox", {}),
    "Adam": ("fedadam", {}),
    "narrow": ("fednarrow", {"sparsity": 0.4, "dense_rounds": 1, "shrink": 0.3}),
    "average": ("fedavg", {"average": True}),
}


@pytest.mark.parametrize("case", ALIKE)
def test_without_noise_and_clip_it_is_the_run_that_is_not_private(case, small_task, monkeypatch) -> None:
    """With the same cohorts, bit for bit."""
    drawn = protocol.cohort
    monkeypatch.setattr(protocol, "cohort", lambda *args, private=False: drawn(*args))
    name, own = ALIKE[case]
    private = simulate(small_task(), name, own, noise_multiplier=0.0, clip=1e30)
    plain = simulate(small_task(), name, own, weighting="equal", bound=0.0)
    for _ in range(4):
        record, expected = private.step(evaluate=True), plain.step(evaluate=True)
        assert record.pop("epsilon") == math.inf
        assert record == expected
    for (path, one), (_, other) in zip(trees.leaves(private.server), trees.leaves(plain.server), strict=True):
        assert torch.equal(one, other), path


def test_clipping_alone_needs_no_privacy_and_engines_agree(small_task) -> None:
    for name, own in (
        ("fedavg", {}),
        ("fedsparse", {"lambda0": 1e-3}),
        ("fedmedian", {}),
        ("feddrop", {"linear_rate": 0.4}),
    ):
        task = small_task(dtype=D)
        alone, together, free = (simulate(task, name, own, clip=clip) for clip in (0.02, 0.02, None))
        engine = Together([together])
        for _ in range(3):
            (found,), expected = engine.step(evaluate=True), alone.step(evaluate=True)
            free.step(evaluate=True)
            assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)
        engine.sync()
        moved = []
        for (path, one), (_, other) in zip(trees.leaves(together.server), trees.leaves(alone.server), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9, check_dtype=False, msg=path)
        for (_, one), (_, other) in zip(trees.leaves(alone.server), trees.leaves(free.server), strict=True):
            moved.append(not torch.allclose(one, other))
        assert any(moved), "and it clips"


def test_a_private_run_noises_the_model_and_says_what_it_spent(small_task) -> None:
    """Clients that do not move: what the server learns is the noise, with z C / E in every weight."""
    pytest.importorskip("dp_accounting")
    task = small_task()
    sim = simulate(task, own={"local_optimiser": "SGD(lr=1e-30)"}, noise_multiplier=3.0, clip=2.0)
    before = trees.tree_map(Tensor.clone, sim.server)["weights"]
    record = sim.step(evaluate=True)
    moved = torch.cat([(sim.server["weights"][name] - value).flatten() for name, value in before.items()])
    assert float(moved.std()) == pytest.approx(3.0 * 2.0 / 3, rel=0.1)
    assert record["epsilon"] == pytest.approx(sim.accountant.total(1))
    assert sim.step(evaluate=False)["epsilon"] > record["epsilon"]


def test_a_private_run_draws_new_noise_in_every_round(small_task) -> None:
    pytest.importorskip("dp_accounting")
    sim = simulate(small_task(), own={"local_optimiser": "SGD(lr=1e-30)"}, noise_multiplier=1.0)
    states = [torch.cat([v.flatten() for v in sim.server["weights"].values()])]
    for _ in range(2):
        sim.step(evaluate=False)
        states.append(torch.cat([v.flatten() for v in sim.server["weights"].values()]))
    first, second = states[1] - states[0], states[2] - states[1]
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.2


def test_a_round_without_clients_is_one_of_noise(small_task) -> None:
    pytest.importorskip("dp_accounting")
    task, sizes = small_task(), set()
    sim = simulate(task, noise_multiplier=1.0, clients_per_round=1)
    for _ in range(12):
        before = trees.tree_map(Tensor.clone, sim.server)
        record = sim.step(evaluate=True)
        sizes.add(record["bytes_up"])
        if not record["bytes_up"]:
            assert math.isnan(record["train_loss"])
            assert not torch.equal(*(next(trees.leaves(one))[1] for one in (before, sim.server)))
    assert 0 in sizes
    assert len(sizes) > 1


def test_a_private_run_resumes_as_it_was_and_not_beyond_its_budget(small_task, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    settings = {"epsilon": 5.0, "clip": 0.1, "rounds": 4, "checkpoint_every": 1}
    whole = fedprior.run(small_task(), "fedavg", **settings, out=tmp_path / "whole")
    broken = fedprior.run(
        *(small_task(), "fedavg"),
        **settings,
        out=tmp_path / "broken",
        progress=lambda r: r["round"] == 2 and fedprior.STOP,
    )
    assert len(broken.records) == 2
    resumed = fedprior.resume(tmp_path / "broken", task=small_task())
    assert resumed.records == whole.records
    assert 4.9 < whole.records[-1]["epsilon"] <= 5
    assert whole.summary["epsilon"] == whole.records[-1]["epsilon"]
    with pytest.raises(SettingError, match="budget is epsilon=5: it allows 4 rounds"):
        fedprior.resume(tmp_path / "broken", task=small_task(), rounds=5)


# ---------------------------------------------------------------------- what does not compose
REFUSED = {
    "chosen gates": ("fedsparse", {}, {}, "clients choose gates"),
    "chosen gates of a size": ("fedsparse-sized", {}, {}, "clients choose gates"),
    "lasso": ("fedl1", {}, {}, "clients choose gates"),
    "own sub-networks": ("feddrop", {}, {}, "every client has its own sub-network"),
    "drawn units": ("fednarrow", {"linear_rate": 0.5}, {}, "leave out conv_rate and linear_rate"),
    "median": ("fedmedian", {}, {}, "M-step is a median"),
    "student": ("fedstudent", {}, {}, "the M-step of StudentT is not a mean"),
    "mixture": ("fedmix", {}, {}, "the M-step of Mixture is not a mean"),
    "masks": ("fedpm", {}, {}, "the M-step of BernoulliMask is not a mean"),
    "control variates": ("scaffold", {}, {}, "the correction sends more than weights"),
    "parts": ("fedtopk", {}, {}, "the correction sends more than weights"),
    "lengths": ("fedavg", {}, {"wire": "int8"}, "set entropy=false"),
    "best": ("fedavg", {}, {"keep": "best"}, "evaluations have no noise"),
    "patience": ("fedavg", {}, {"patience": 3}, "evaluations have no noise"),
    "mode": ("fedavg", {}, {"mode": "vectorised"}, "leave out mode"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_outside_the_mechanism_is_refused_in_one_line(case: str, small_task) -> None:
    name, own, settings, words = REFUSED[case]
    task = small_task()
    chosen = fedprior.algorithm(name, task.network, **own)
    check_guard(Settings(**settings), chosen, task.network)
    with pytest.raises(SettingError, match=words) as caught:
        check_guard(Settings(noise_multiplier=1.0, **settings), chosen, task.network)
    assert "\n" not in str(caught.value)


def test_what_composes_is_not_refused(small_task) -> None:
    task = small_task()
    chosen = fedprior.algorithm("fedavg", task.network)
    for fine in (
        {"wire": "int8/float16"},
        {"wire": "int8", "entropy": False},
        {"wire": "bfloat16"},
        {"attack": "scale"},
    ):
        check_guard(Settings(noise_multiplier=1.0, **fine), chosen, task.network)


@pytest.mark.parametrize(
    ("name", "words"), [("fedmix", "several models"), ("scaffold", "control travels"), ("fedpm", "no weights travel")]
)
def test_a_clip_needs_a_distance(name: str, words: str, small_task) -> None:
    task = small_task()
    chosen = fedprior.algorithm(name, task.network)
    with pytest.raises(SettingError, match=f"clip is the distance of an upload's weights, but .*{words}"):
        check_guard(Settings(clip=1.0), chosen, task.network)


def test_a_private_run_counts_clients_equally(small_task) -> None:
    pytest.importorskip("dp_accounting")
    sim = simulate(small_task(), noise_multiplier=1.0)
    assert sim.share([0, 1, 2]).weight is None
    assert simulate(small_task()).share([0, 1, 2]).weight is not None
    assert replace(sim.settings, noise_multiplier=None).private is False
