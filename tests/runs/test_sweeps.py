"""Sweeps: which runs there are, and that stopping and starting again changes nothing."""

import json

import pytest

from fedprior import RunError, SettingError
from fedprior.runs import sweeps
from fedprior.runs.start import resume

SMALL = {"rounds": "3", "clients_per_round": "2", "local_steps": "1", "evaluate_every": "9", "device": "cpu"}
SMALL |= {"clients": "300", "checkpoint_every": "1", "mode": "vectorised"}


class Broken(BaseException):
    """Stands for the end of the process."""


def plan(out, seeds=(0, 1), name="fedsparse", **settings):
    return sweeps.plan("mnist-mini", name, seeds, {**SMALL, **settings}, out, {})


def stop_after(rounds):
    def progress(record):
        if record["round"] == rounds:
            raise Broken

    return progress


class Stopping:
    """What shows the progress, and ends the process after so many rounds."""

    def __init__(self, rounds):
        self.progress = stop_after(rounds)

    def __enter__(self):
        return self.progress

    def __exit__(self, *_):
        return None


def records(spec):
    return [json.loads(line) for line in (spec.out / "rounds.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------- which runs there are


def test_a_grid_is_every_combination():
    assert list(sweeps.grid({"a": "1,2", "b": "x", "c": "3, 4"})) == [
        {"a": a, "b": "x", "c": c} for a in "12" for c in "34"
    ]


def test_brackets_keep_a_value_together():
    values = {"o": "SGD(lr=0.1, momentum=0.9),Adam(betas=(0.9, 0.99))", "u": "[fc1,fc2],[fc1],fc2"}
    found = list(sweeps.grid(values))
    assert {one["o"] for one in found} == {"SGD(lr=0.1, momentum=0.9)", "Adam(betas=(0.9, 0.99))"}
    assert {one["u"] for one in found} == {"fc1,fc2", "fc1", "fc2"}


@pytest.mark.parametrize(
    ("seeds", "settings", "message"),
    [
        ((0, 0), {}, "twice"),
        ((0,), {"lambda0": "1e-6,1e-6"}, "twice"),
        (
            (0, 1),
            {"lambda0": "5e-6,1e-6,0.000005"},
            "^'fedsparse lambda0=5e-6' and 'fedsparse lambda0=0.000005' are the same",
        ),
        ((0,), {"alpha": "1,1.0"}, "alpha=1' and 'fedsparse alpha=1.0' are the same settings"),
        ((0,), {"wire": "int4,int4/int4"}, "are the same settings"),
        ((0,), {"local_optimiser": "SGD(lr=0.1),SGD(lr=1e-1)"}, "are the same settings"),
        ((0,), {"seed": "1,2"}, "--seeds"),
        ((0,), {"lambda0": "1e-6,,1e-5"}, "empty"),
        ((0,), {"lamda0": "1e-6"}, "lambda0"),
    ],
)
def test_an_impossible_plan_is_refused(tmp_path, seeds, settings, message):
    with pytest.raises(SettingError, match=message):
        plan(tmp_path, seeds, **settings)


def test_values_that_differ_are_no_repetition(tmp_path):
    found = plan(tmp_path, lambda0="5e-6,5.0000001e-6", wire="int4,int8/int4,int4/int8", alpha="1,2")
    assert len(found) == 2 * 2 * 3 * 2


@pytest.mark.parametrize(
    ("seeds", "settings", "message"),
    [
        ((0,), {"clients_per_round": "2,301"}, "only 300 clients"),
        ((0,), {"lambda0": "1e-6,-1"}, "at least 0"),
        ((2**63,), {}, "64 bits"),
    ],
)
def test_everything_is_checked_before_anything_is_trained(tmp_path, seeds, settings, message):
    with pytest.raises(SettingError, match=message):
        sweeps.train(plan(tmp_path / "sweep", seeds, **settings))
    assert not (tmp_path / "sweep").exists()


def test_runs_that_differ_in_more_than_numbers_of_the_prior_train_apart(tmp_path):
    specs = plan(tmp_path, lambda0="1e-6,1e-5", temperature="1e-3,2e-3", alpha="1.0,10.0", floor="1,2")
    built = [sweeps._build(spec, {}) for spec in specs]
    groups = sweeps._mates(specs, built)
    assert sorted(place for places in groups for place in places) == list(range(32))
    for places in groups:
        assert len(places) == 8  # two seeds, two λ0, two temperatures
        assert len({(specs[p].task_options["alpha"], specs[p].algorithm_settings["floor"]) for p in places}) == 1


# ---------------------------------------------------------------------- stopped and started again


def test_a_stopped_sweep_continues_every_run_where_it_was(tmp_path):
    """Other stacks than before, so other last bits: a gate that opens softly does not make much of them."""
    soft = {"lambda0": "1e-6,1e-3", "temperature": "0.1"}
    whole, broken = (plan(tmp_path / name, **soft) for name in ("whole", "broken"))
    sweeps.train(whole)
    with pytest.raises(Broken):
        sweeps.train(broken, lambda group, rounds: Stopping(1))
    with pytest.raises(Broken):  # one of them goes further alone
        resume(broken[2].out, progress=stop_after(2))
    resume(broken[3].out)  # and one to its end
    assert [len(records(spec)) for spec in broken] == [1, 1, 2, 3]
    left = sweeps.unfinished(broken)
    assert left == broken[:3]
    sweeps.train(left)
    assert sweeps.unfinished(broken) == []
    for one, other in zip(whole, broken, strict=True):
        for a, b in zip(records(one), records(other), strict=True):
            assert a == pytest.approx(b, rel=1e-4)
            assert "faults" not in a, "steps that grow from round to round are no faults"
    assert records(whole[0]) != records(whole[1])
    assert records(whole[0]) != records(whole[2])


def test_a_folder_with_other_settings_is_refused(tmp_path):
    """The same --out with another λ0 must not pass the old runs off as the new ones."""
    before = plan(tmp_path, (0,), lambda0="1e-6", rounds="1")
    sweeps.train(before)
    assert sweeps.unfinished(plan(tmp_path, (0,), lambda0="1e-6", rounds="1", mode="in-turn")) == []
    for changed in ({"lambda0": "1e-5", "rounds": "1"}, {"rounds": "1"}, {"lambda0": "1e-6", "rounds": "2"}):
        with pytest.raises(RunError, match=r"has (lambda0|rounds) = .*, not .*; delete it, or choose another --out"):
            sweeps.unfinished(plan(tmp_path, (0,), **changed))
        (before[0].out / "summary.json").rename(tmp_path / "kept.json")
        with pytest.raises(RunError, match="not"):
            sweeps.train(plan(tmp_path, (0,), **changed))
        (tmp_path / "kept.json").rename(before[0].out / "summary.json")


def test_a_folder_of_an_older_version_continues_or_says_how(tmp_path):
    """Settings that it does not know had their defaults; one whose default has another name can be asked for."""
    specs = plan(tmp_path, (0,), "fednarrow", rounds="1")
    sweeps.train(specs)
    config = specs[0].out / "config.toml"
    text = config.read_text()
    younger = ("wire =", "entropy =", "sparsity =", "max_parameters =", "shrink =", "dense_rounds =")
    assert all(f"\n{name}" in text for name in younger)
    config.write_text("\n".join(line for line in text.splitlines() if not line.startswith(younger)) + "\n")
    assert sweeps.unfinished(specs) == []
    config.write_text(text.replace('dense_rounds = "none"', "dense_rounds = 0"))
    with pytest.raises(RunError, match=r"has dense_rounds = 0, not none; .* or ask for dense_rounds=0"):
        sweeps.unfinished(specs)
    assert sweeps.unfinished(plan(tmp_path, (0,), "fednarrow", rounds="1", dense_rounds="0")) == []
