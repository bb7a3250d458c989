"""Runs of one label: rows, legends and lines that can be told apart."""

import json
import tomllib

from fedprior.report.names import told_apart
from fedprior.report.page import page
from fedprior.report.page_data import page_data
from fedprior.report.records import group_runs, read_run
from fedprior.report.run_tables import numbers_of_runs, table_of_runs
from fedprior.report.watch import look
from fedprior.report.write import gather
from fedprior.runs.folder import to_toml
from fedprior.runs.repeat import repeat_command


def set_in(folder, table, **settings):
    config = tomllib.loads((folder / "config.toml").read_text())
    config[table] |= settings
    (folder / "config.toml").write_text(to_toml(config))


def made(write_run, tmp_path, *settings, seeds=(0,), label="fedsparse"):
    runs = []
    for number, (of_algorithm, of_run) in enumerate(settings):
        for seed in seeds:
            folder = write_run(tmp_path / f"run-{number}-{seed}", label=label, seed=seed, rounds=20, clients=5)
            set_in(folder, "algorithm", **of_algorithm)
            set_in(folder, "run", **of_run)
            runs.append(folder)
    return runs


def labels(folders):
    return [run.label for run in told_apart([read_run(folder) for folder in folders])]


def test_runs_are_named_by_exactly_what_differs(write_run, tmp_path):
    same = {"floor": 1, "gate_output": False}
    found = labels(
        made(
            write_run,
            tmp_path,
            ({**same, "lambda0": 5e-6}, {"wire": "float32", "device": "cpu"}),
            ({**same, "lambda0": 5e-5}, {"wire": "float32", "device": "cuda"}),
            ({**same, "lambda0": 5e-5}, {"wire": "int8/int4", "device": "cpu"}),
            ({**same, "lambda0": 5e-5}, {"wire": "int8/int4", "device": "cpu", "epochs": 2}),
        )
    )
    assert found == [
        "fedsparse lambda0=5e-06",
        "fedsparse lambda0=5e-05",
        "fedsparse lambda0=5e-05, wire=int8/int4",
        "fedsparse lambda0=5e-05, wire=int8/int4, epochs=2",
    ]


def test_a_run_older_than_a_setting_has_what_was_before(write_run, tmp_path):
    """Without `bound` a run had none; without `unseen` it had what is now the default."""
    found = labels(made(write_run, tmp_path, ({}, {"bound": 8.0}), ({}, {"unseen": 0.0}), ({}, {"bound": 4.0})))
    assert found == ["fedsparse", "fedsparse bound=0.0", "fedsparse bound=4.0"]


def test_a_long_name_is_the_folders(write_run, tmp_path):
    long = {"local_optimiser": "SGD(lr=0.05, momentum=0.5, nesterov=true, weight_decay=0.0001)"}
    assert labels(made(write_run, tmp_path / "a", ({}, {}), (long, {}))) == [
        "fedsparse local_optimiser=none",
        "fedsparse (run-1-0)",
    ]
    seeds = labels(made(write_run, tmp_path / "b", ({}, {}), (long, {}), seeds=(0, 1)))
    assert len(set(seeds)) == 2, "seeds of one setting stay together"


def test_a_redundant_setting_is_left_out_of_the_name(write_run, tmp_path):
    """Two that always change together: one of them tells."""
    found = labels(made(write_run, tmp_path, *(({"a": i, "b": 10 * i}, {"epochs": i}) for i in (1, 2, 3))))
    assert found == ["fedsparse a=1", "fedsparse a=2", "fedsparse a=3"]


def test_seeds_of_one_setting_stay_together(write_run, tmp_path):
    one = made(write_run, tmp_path / "a", ({"lambda0": 1}, {}), seeds=(0, 1, 2))
    assert set(labels(one)) == {"fedsparse"}
    two = made(write_run, tmp_path / "b", ({"lambda0": 2}, {}), seeds=(0, 1))
    groups = group_runs(told_apart([read_run(folder) for folder in [*one, *two]]))
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("fedsparse lambda0=1", 3),
        ("fedsparse lambda0=2", 2),
    ]


def test_the_same_run_twice_is_named_by_its_folder(write_run, tmp_path):
    first, second = made(write_run, tmp_path, ({}, {}), ({}, {}))
    assert labels([first, second]) == ["fedsparse (run-0-0)", "fedsparse (run-1-0)"]
    (other,) = made(write_run, tmp_path / "elsewhere", ({}, {}))
    assert labels([first, other]) == [f"fedsparse ({first})", f"fedsparse ({other})"]


def test_six_settings_of_one_algorithm_are_six_rows_and_six_lines(write_run, tmp_path):
    """What was seen: six rows called "fedsparse"."""
    made(write_run, tmp_path, *(({"lambda0": 10.0**-i}, {}) for i in range(4, 10)))
    runs = gather([tmp_path]).runs
    names = [f"fedsparse lambda0={json.dumps(10.0**-i)}" for i in range(4, 10)]
    assert sorted(line["name"] for line in page_data(group_runs(runs))["runs"]) == sorted(names)
    html = page(runs, repeat=repeat_command)
    for name in names:
        assert html.count(f"</span>{name}</th>") == 2  # among the results, and among what differs
        assert f"| {name} |" in table_of_runs(runs).markdown()
        assert name in numbers_of_runs(runs).csv()
        assert f"{name.replace('_', chr(92) + '_')} &" in table_of_runs(runs).latex()
    assert sorted(seen.run.label for seen in look(tmp_path)) == sorted(names)
    # The command says the recorded label.
    assert "--label fedsparse " in repeat_command(runs[0])
    assert "lambda0=" in repeat_command(runs[0]).split("--set", 1)[1]


def test_one_label_on_two_tasks(write_run, tmp_path):
    for task in ("cifar10", "mnist-mini"):
        write_run(tmp_path / task, task=task, rounds=20, clients=5)
    runs = gather([tmp_path]).runs
    assert [run.label for run in runs] == ["cifar10 fedavg", "mnist-mini fedavg"]
    assert [line["name"] for line in page_data(group_runs(runs))["runs"]] == ["cifar10 fedavg", "mnist-mini fedavg"]
