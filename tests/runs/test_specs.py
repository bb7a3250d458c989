"""Specs: a run on disk is what is asked, or the first setting in which it is not is named."""

import json
import shutil
from dataclasses import replace

import pytest

from fedprior import RunError, SettingError
from fedprior.runs import sweeps
from fedprior.runs.specs import Spec, check_same, differences, missing

RUN = {"rounds": "1", "clients_per_round": "2", "local_steps": "1", "evaluate_every": "9", "device": "cpu"}


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A finished run; it has no label of its own."""
    out = tmp_path_factory.mktemp("specs") / "run"
    spec = Spec("mnist-mini", "fedsparse", out, 3, "", RUN, {"clients": "300"}, {"lambda0": "1e-6"})
    sweeps.train([spec])
    return spec


@pytest.fixture
def trained(once, tmp_path):
    """A copy of it."""
    return replace(once, out=shutil.copytree(once.out, tmp_path / "run"))


def test_a_finished_run_is_recognised_despite_label_and_machine(trained):
    assert missing([trained]) == sweeps.unfinished([trained]) == []
    assert missing([replace(trained, label="fedsparse")]) == []
    assert missing([replace(trained, run={**RUN, "mode": "in-turn", "workers": "2", "checkpoint_every": "none"})]) == []
    other = replace(trained, out=trained.out.with_name("other"))
    assert missing([other, trained]) == [other]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, "seed = 3, not 4"),
        ({"label": "mine"}, "label = fedsparse, not mine"),
        ({"run": {**RUN, "rounds": 2}}, "rounds = 1, not 2; delete it"),
        ({"run": {**RUN, "local_steps": "none"}}, "local_steps = 1, not None"),
        ({"task_options": {"clients": "300", "alpha": "0.5"}}, "alpha = .*, not 0.5"),
        ({"algorithm_settings": {"lambda0": 2}}, "lambda0 = 1e-06, not 2.0"),
    ],
)
def test_another_run_is_refused_by_the_setting_that_differs(trained, changes, words):
    with pytest.raises(RunError, match=f"has {words}"):
        missing([replace(trained, **changes)])


def test_a_setting_newer_than_the_run_counts_as_its_default(trained):
    path = trained.out / "config.toml"
    younger = ("wire =", "validation =", "floor =", "evaluate_every =")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith(younger)) + "\n")
    same = replace(trained, run={key: value for key, value in RUN.items() if key != "evaluate_every"})
    assert missing([replace(same, run={**same.run, "wire": "float32"})]) == []
    for changes in (
        {"run": {**same.run, "wire": "int8"}},
        {"task_options": {"clients": "300", "validation": "true"}},
        {"algorithm_settings": {"lambda0": "1e-6", "floor": "2"}},
    ):
        with pytest.raises(RunError, match=r"has (wire|validation|floor) = .*, not (int8|True|2)"):
            missing([replace(same, **changes)])


def test_a_run_on_a_task_with_another_seed_is_another_run(trained):
    path = trained.out / "config.toml"
    path.write_text(path.read_text().replace("[task]\n", "[task]\nseed = 8\n"))
    with pytest.raises(RunError, match="has the task's seed = 8, not None"):
        missing([trained])


def test_extra_recorded_settings_matter_only_for_a_whole_config(trained):
    expected = {**trained.config(), "algorithm": {}}
    check_same(trained.out, expected)
    with pytest.raises(RunError, match=r"has .* = .*, not None"):
        check_same(trained.out, expected, whole=True)


def test_all_differences_are_listed_in_order():
    recorded = {"run": {"rounds": 3}, "task": {}, "algorithm": {"lambda0": 1.0}}
    expected = {
        "run": {"task": "own", "algorithm": "own", "rounds": 4},
        "task": {"device": 1, "size": 2},
        "algorithm": {"lambda0": 1.0},
    }
    assert differences(recorded, expected, {"task", "algorithm"}) == [
        ("rounds", 3, 4),
        ("device", None, 1),
        ("size", None, 2),
    ]
    assert differences(recorded, expected, {"task", "algorithm", "device", "rounds"}) == [("size", None, 2)]


def test_an_impossible_value_is_refused_without_data(tmp_path):
    for changes in ({"run": {"rounds": "0"}}, {"task_options": {"clients": "many"}}, {"algorithm_settings": {"x": 1}}):
        with pytest.raises(SettingError):
            Spec("mnist-mini", "fedsparse", tmp_path, **changes).config()


def test_a_folder_that_is_not_a_run_is_refused_before_training(tmp_path):
    spec = Spec("mnist-mini", "fedavg", tmp_path / "run", run=RUN)
    spec.out.mkdir()
    (spec.out / "config.toml.part").write_text("half")  # from a crash in the first moment
    assert sweeps.unfinished([spec]) == [spec]
    (spec.out / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match=r"cannot be continued: has no config\.toml; delete it"):
        sweeps.unfinished([spec])
    with pytest.raises(RunError, match="cannot be continued"):
        missing([replace(spec, out=spec.out / "thesis.tex")])


def test_a_finished_run_with_damaged_records_is_not_accepted(trained):
    path = trained.out / "rounds.jsonl"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "round": 2}) + "\n")
    with pytest.raises(RunError, match=r"cannot be continued: .*line 1 is not round 1"):
        missing([trained])
