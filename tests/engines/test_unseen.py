"""Clients that are held out: never asked, and judged with the server's model as it is and as newcomers."""

import numpy as np
import pytest
import torch

import fedprior
from fedprior.core.errors import SettingError
from fedprior.core.keys import Turn, key
from fedprior.em import protocol
from fedprior.engines.privacy import Accountant
from fedprior.engines.unseen import Roll
from fedprior.report.page import page
from fedprior.report.records import read_run
from fedprior.trained.export import personal_model

SIZES = (5, 11, 2, 8, 9, 3, 6, 7)
ALGORITHMS = ["fedavg", "fedmix", "fedsparse", "scaffold", "fedpm", "fedl1"]


def held(small_task, name="fedavg", **settings):
    task = small_task(SIZES, dtype=torch.float64, **{"rounds": 3, "unseen": 0.25, **settings})
    return fedprior.run(task, fedprior.algorithm(name, task.network))


def test_everyone_takes_part_unless_somebody_is_held_out():
    """And then every client is held out as often as any other."""
    nobody = Roll.of(key(0), 10, 0.0)
    turn = Turn(key(0), 3)
    assert (nobody.seen, nobody.unseen) == (list(range(10)), [])
    assert nobody.cohort(turn, 4) == protocol.cohort(turn, 10, 4)
    counts = np.zeros(10)
    for seed in range(300):
        roll = Roll.of(key(seed), 10, 0.2)
        assert sorted(roll.seen + roll.unseen) == list(range(10))
        counts[roll.unseen] += 1
        assert not set(roll.cohort(turn, 8)) & set(roll.unseen)
    assert counts.sum() == 600
    assert abs(counts - 60).max() < 5 * (60 * 0.8) ** 0.5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_both_engines_judge_newcomers_alike(small_task, name):
    one, other = (held(small_task, name, mode=mode) for mode in ("in-turn", "vectorised"))
    apart = [field for field in one.summary if field.startswith(("unseen_", "newcomer_"))]
    assert {"unseen_accuracy", "newcomer_accuracy", "unseen_nll", "newcomer_loss"} <= set(apart)
    for field in apart:
        assert one.summary[field] == pytest.approx(other.summary[field], abs=1e-9), field
    run = one.simulation
    assert run.scores["accuracy"][run.roll.unseen].isnan().all()
    # The E-step is that of a personal model.
    found = []
    for client in run.roll.unseen:
        rows = run.data.test[client]
        outputs = personal_model(run, client)(run.data.test_x[rows])
        found.append(float((outputs.argmax(1) == run.data.test_y[rows]).double().mean()))
    assert one.summary["newcomer_accuracy"] == pytest.approx(np.mean(found))


def test_global_scores_are_of_those_who_take_part_and_unseen_ones_of_the_others(small_task, tmp_path):
    task = small_task(SIZES, dtype=torch.float64, rounds=2, unseen=0.25)
    result = fedprior.run(task, "fedavg", out=tmp_path / "run")
    roll, data = result.simulation.roll, task.data
    assert len(roll.unseen) == 2
    for clients, field in ((roll.seen, "global_accuracy"), (roll.unseen, "unseen_accuracy")):
        rows = torch.cat([data.test[client] for client in clients])
        right = (result.model(data.test_x[rows]).argmax(1) == data.test_y[rows]).double().mean()
        assert result.summary[field] == pytest.approx(float(right))
    table = read_run(tmp_path / "run").clients
    assert np.isfinite(table.last("server_accuracy")).all()
    resumed = fedprior.resume(tmp_path / "run", task=task, rounds=3)
    assert resumed.records == fedprior.run(task, "fedavg", rounds=3).records[:1] + resumed.records[1:]


def test_tables_show_their_accuracies_in_percent(small_task, tmp_path):
    found = []
    for seed in (0, 1):
        task = small_task(SIZES, dtype=torch.float64, rounds=2, unseen=0.25, seed=seed)
        found.append(fedprior.run(task, "fedavg", out=tmp_path / str(seed)))
    shown = page([read_run(tmp_path / str(seed)) for seed in (0, 1)])
    for name in ("unseen_accuracy", "newcomer_accuracy"):
        values = [100 * result.summary[name] for result in found]
        assert f" {values[0]:.1f}%" in repr(found[0])
        error = f"<small> ± {abs(values[0] - values[1]) / 2:.1f}</small>%"
        assert f">{sum(values) / 2:.1f}{error}<" in shown


def test_those_held_out_have_no_part_in_the_shares(small_task):
    """All that take part, in one round: then scaffold's server moves by the whole of what they send."""
    run = held(small_task, "scaffold", clients_per_round=6).simulation
    share = run.share(run.roll.seen)
    assert float(share.fraction) == pytest.approx(1)


def test_a_private_run_is_sampled_from_those_who_take_part(small_task):
    """Or its ε would be too small: of six clients three are half."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    result = held(small_task, clip=1.0, noise_multiplier=1.0, rounds=2)
    assert result.records[-1]["epsilon"] == Accountant(3 / 6, 1.0, result.simulation.settings.delta).total(2)


def test_what_makes_no_sense_is_refused(small_task):
    for given, why in (
        ({"unseen": 0.05}, "unseen=0.05 has no effect: of 8 clients that is none"),
        ({"unseen": 1.0}, "unseen must be at least 0 and below 1"),
        ({"unseen": 0.9}, "clients_per_round is 3, but there are only 1 clients that take part"),
        ({"unseen": 0.25, "test_sizes": (0,) * 8}, "needs test examples"),
    ):
        with pytest.raises(SettingError, match=why):
            held(small_task, **given)
