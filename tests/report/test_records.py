"""Runs read back from disk: equal to what was run, robust against every kind of damage, grouped over seeds."""

import html
import io
import json
import math
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import fedprior
import fedprior.report
from fedprior.core.late import late
from fedprior.report.names import told_apart
from fedprior.report.page import page
from fedprior.report.records import Broken, Run, estimate, find_runs, group_runs, read_run
from fedprior.report.run_tables import numbers_of_runs, table_of_runs
from fedprior.report.watch import look, view


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two algorithms with two seeds each, trained on a task of milliseconds; never changed by a test."""
    root = tmp_path_factory.mktemp("runs")
    x, y = np.random.RandomState(0).randn(40, 3), np.arange(40) % 2
    data = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    clients = [(data[0][i::4], data[1][i::4], data[0][i::4], data[1][i::4]) for i in range(4)]
    results = {}
    for name in ("fedavg", "fedprox"):
        for seed in (1, 0):
            task = fedprior.own_task(torch.nn.Linear(3, 2), clients, batch_size=5, evaluate_every=2, device="cpu")
            results[name, seed] = fedprior.run(
                task, name, out=root / name / f"seed-{seed}", seed=seed, rounds=5, clients_per_round=2
            )
    return root, results


@pytest.fixture
def run(made, tmp_path):
    """A finished run's folder that a test may damage."""
    return shutil.copytree(made[0] / "fedavg" / "seed-0", tmp_path / "run")


def test_a_run_reads_back_as_it_was(made):
    root, results = made
    run, result = read_run(root / "fedprox" / "seed-1"), results["fedprox", 1]
    assert isinstance(run, Run)
    assert run.rounds == result.records
    assert run.summary == result.summary
    assert (run.task, run.algorithm, run.label, run.seed, run.planned) == ("own", "fedprox", "fedprox", 1, 5)
    assert run.finished
    assert run.series("global_accuracy") == {r: result.records[r - 1]["global_accuracy"] for r in (2, 4, 5)}
    total = sum(record["bytes_up"] + record["bytes_down"] for record in result.records)
    assert run.final("gib") == run.series("gib")[5] == total / 2**30


def test_groups_are_means_over_seeds_with_standard_errors(made):
    root, results = made
    groups = group_runs(find_runs(root).runs)
    assert [(group.task, group.label, [run.seed for run in group.runs]) for group in groups] == [
        ("own", "fedavg", [0, 1]),
        ("own", "fedprox", [0, 1]),
    ]
    values = [results["fedavg", seed].summary["local_accuracy"] for seed in (0, 1)]
    final = groups[0].final("local_accuracy")
    assert final.mean == pytest.approx(statistics.mean(values))
    assert final.error == pytest.approx(statistics.stdev(values) / math.sqrt(2))
    curve = groups[0].curve("local_accuracy")
    assert curve.x.tolist() == [2, 4, 5]
    assert (curve.mean[-1], curve.error[-1]) == (final.mean, final.error)
    sent = groups[0].curve("local_accuracy", against="gib")
    assert sent.x[-1] == pytest.approx(groups[0].final("gib").mean)
    assert np.all(np.diff(sent.x) > 0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9))
def test_estimates_are_those_of_the_standard_library(values):
    made = estimate([*values, math.nan])
    assert made.count == len(values)
    assert made.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert made.error == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-4)


def test_a_single_run_has_no_error_and_no_runs_have_no_mean():
    assert estimate([3.0]).mean == 3.0
    assert math.isnan(estimate([3.0]).error)
    assert math.isnan(estimate([]).mean)


def test_a_curve_ends_with_the_shortest_run(made, run):
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    (run / "rounds.jsonl").write_text("".join(lines[:3]))
    (run / "summary.json").unlink()
    (group,) = group_runs([read_run(run), read_run(made[0] / "fedavg" / "seed-1")])
    assert group.curve("global_accuracy").x.tolist() == [2]


def test_settings_that_differ_within_a_group_are_named(made):
    root, _ = made
    runs = [read_run(root / name / "seed-0") for name in ("fedavg", "fedprox")]
    for run in runs:
        run.config["run"]["label"] = "same"
    (group,) = group_runs(runs)
    assert group.mixed == ["algorithm", "precision"]
    assert group_runs(find_runs(root).runs)[0].mixed == []


# ---------------------------------------------------------------------- unfinished


def test_an_unfinished_run_is_a_run_without_a_summary(run):
    (run / "summary.json").unlink()
    with (run / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round": 6, "bytes_')
    read = read_run(run)
    assert not read.finished
    assert len(read.rounds) == 5
    assert read.final("global_accuracy") == read.rounds[-1]["global_accuracy"]
    (run / "rounds.jsonl").unlink()
    read = read_run(run)
    assert list(read.rounds) == []
    assert math.isnan(read.final("global_accuracy"))
    assert math.isnan(read.final("gib"))
    assert len(group_runs([read])[0].curve("global_accuracy").x) == 0


def test_a_diverged_run_is_marked_until_it_is_finished(run):
    (run / "diverged.txt").write_text("client 3 diverged in round 2\n")
    assert read_run(run).trouble == ""
    (run / "summary.json").unlink()
    assert read_run(run).trouble == "client 3 diverged in round 2"


def test_missing_numbers_are_nan(run):
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "global_accuracy": None}))
    assert math.isnan(read_run(run).final("global_accuracy"))


# ---------------------------------------------------------------------- broken

DEEP = '{"x":' * 99_999 + "1" + "}" * 99_999
DAMAGE = {
    "config missing": ("config.toml", lambda text: None, "no config.toml"),
    "config cut": ("config.toml", lambda text: text[: text.index("=") + 1], "config.toml is damaged"),
    "config of something else": ("config.toml", lambda text: "[tool]\nx = 1\n", r"no table \[run\]"),
    "config without a seed": ("config.toml", lambda text: text.replace("seed = ", "sead = "), "has no seed"),
    "config nested": ("config.toml", lambda text: f"{text}x = {'[' * 9999}{']' * 9999}\n", "nested too deeply"),
    "config of too many rounds": (
        "config.toml",
        lambda text: text.replace("rounds = 5", "rounds = 5" + "0" * 99),
        "no run",
    ),
    "config as bytes": ("config.toml", lambda text: b"\xff\xfe", "config.toml is damaged"),
    "rounds missing": ("rounds.jsonl", lambda text: None, "says 5 rounds, but rounds.jsonl holds 0"),
    "rounds cut": ("rounds.jsonl", lambda text: text[: len(text) // 2], "says 5 rounds"),
    "rounds damaged": ("rounds.jsonl", lambda text: text.replace("{", "<", 1), "damaged in line 1"),
    "a round lost": ("rounds.jsonl", lambda text: text[text.index("\n") + 1 :], "line 1 is not round 1"),
    "not records": ("rounds.jsonl", lambda text: "[]\n" * 5, "line 1 is not round 1"),
    "no bytes": ("rounds.jsonl", lambda text: text.replace("bytes_up", "bytes_out"), "line 1 has no bytes"),
    "bytes beyond all bounds": ("rounds.jsonl", lambda text: text.replace('up": ', 'up": ' + "9" * 400, 1), "no bytes"),
    "a round nested": (
        "rounds.jsonl",
        lambda text: text.replace('loss": ', 'loss": ' + DEEP, 1),
        "line 1: .* too deeply",
    ),
    "summary nested": ("summary.json", lambda text: text.replace('"seed": ', f'"x": {DEEP}, "seed": '), "too deeply"),
    "summary of half a letter": ("summary.json", lambda text: text.replace("fedavg", r"\ud800"), "surrogates"),
    "summary cut": ("summary.json", lambda text: text[:-10], "summary.json is damaged"),
    "summary empty": ("summary.json", lambda text: "{}", "summary.json is damaged"),
    "summary of words": (
        "summary.json",
        lambda text: text.replace('"sparsity": ', '"sparsity": "high",\n"x": '),
        "spars",
    ),
    "partition cut": ("partition.json", lambda text: '{"fingerprint": "12", "classes": 2', "partition.json is damaged"),
    "partition of another shape": (
        "partition.json",
        lambda text: json.dumps({"fingerprint": "12", "classes": 2, "train": [[1, 2], [3]], "test": [[0, 0]]}),
        "partition.json is damaged",
    ),
    "a folder for a file": ("summary.json", lambda text: "folder", ""),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_run_is_one_line_and_hides_no_other(run, made, tmp_path, case):
    name, change, words = DAMAGE[case]
    text = (run / name).read_text() if (run / name).exists() else ""
    changed = change(text)
    (run / name).unlink(missing_ok=True)
    if changed == "folder":
        (run / name).mkdir()
        assert not read_run(run).finished
        return
    if changed is not None:
        (run / name).write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    read = read_run(run)
    assert isinstance(read, Broken)
    assert "\n" not in read.reason
    assert re.search(words, read.reason), read.reason
    shutil.copytree(made[0], tmp_path / "others")
    found = find_runs(tmp_path)
    assert [broken.path for broken in found.broken] == [run]
    assert len(found.runs) == 4


@given(st.binary(max_size=60), st.sampled_from(["config.toml", "rounds.jsonl", "summary.json", "partition.json"]))
def test_damaged_files_never_raise(made, tmp_path_factory, content, name):
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    shutil.copytree(made[0] / "fedavg" / "seed-0", folder)
    (folder / name).write_bytes(content)
    assert isinstance(read_run(folder), Run | Broken)


ODD = ["null", "true", "-1", "9" * 400, "1e400", "NaN", '"x"', "[]", "{}", "[[{}]]", "[" * 400 + "]" * 400]


FILES = ("rounds.jsonl", "summary.json", "partition.json", "times.jsonl")


@given(st.sampled_from(FILES), st.integers(0, 99), st.sampled_from(ODD))
@settings(max_examples=60, deadline=None)
def test_an_odd_value_never_keeps_other_runs_from_being_shown(made, tmp_path_factory, name, place, value):
    """Whatever a key holds, all that shows runs shows the run, or names it."""
    root = tmp_path_factory.mktemp("odd")
    good = shutil.copytree(made[0] / "fedavg" / "seed-0", root / "good")
    odd = shutil.copytree(good, root / "odd")
    text = (odd / name).read_text()
    held, end = json.JSONDecoder().raw_decode(text)
    keys = sorted({*held, "units/fc", "sparsity/fc", "faults", "clipped", "global_accuracy_late"})
    changed = json.dumps(held | {keys[place % len(keys)]: "here"}).replace('"here"', value)
    (odd / name).write_text(changed + text[end:])
    found = find_runs(root)
    assert good in [run.path for run in found.runs]
    assert len(found.runs) + len(found.broken) == 2
    runs = told_apart(found.runs)
    text = page(runs, found.broken)
    assert all(html.escape(str(one.path)) in text for one in (*runs, *found.broken))
    assert len(numbers_of_runs(runs).csv().splitlines()) == len(table_of_runs(runs).csv().splitlines()) == len(runs) + 1
    Console(file=io.StringIO()).print(view(root, look(root)))


def test_an_empty_folder_holds_no_runs(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        assert find_runs(path).runs == find_runs(path).broken == []
    assert "no config.toml" in read_run(tmp_path).reason


def test_the_report_imports_nothing_that_trains():
    for path in Path(fedprior.report.__file__).parent.glob("*.py"):
        imported = set(re.findall(r"^\s*(?:from|import) (fedprior[.\w]*)", path.read_text(), re.MULTILINE))
        assert all(
            name.startswith(("fedprior.report", "fedprior.version"))
            or name
            in tuple(f"fedprior.core.{part}" for part in ("errors", "files", "late", "locks", "options", "settings"))
            for name in imported
        ), path.name


@pytest.mark.parametrize(
    ("rounds", "every", "counted"), [(100, 1, [96, 97, 98, 99, 100]), (40, 5, [40]), (60, 7, [60])]
)
def test_late_is_the_mean_over_the_evaluations_in_the_last_five_percent(rounds, every, counted):
    evaluated = [*range(every, rounds, every), rounds]
    records = [{"round": r, "a": r**2 if r in evaluated else None} for r in range(1, rounds + 1)]
    assert late(records, "a") == pytest.approx(np.mean([r**2 for r in counted]))
    assert math.isnan(late(records, "b"))
    broken = [*records[:-1], {"round": rounds, "a": math.nan}]  # what is no number is no evaluation
    assert late(broken, "a") == pytest.approx(np.mean([r**2 for r in counted[:-1] or evaluated[-2:-1]]))
