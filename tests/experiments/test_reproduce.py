"""`fedprior reproduce`: keeps what is finished, continues what is not, ends with table and figures."""

import csv
import io
import json
import math
import re
import shutil
import statistics
import sys

import pytest

import fedprior
from fedprior import cli
from fedprior.report.progress import RunProgress
from fedprior_experiments.reproduce import EXPERIMENTS, Cell, Cells, Experiment, Method

TINY = Experiment(
    "tiny",
    "A tiny experiment",
    "tiny",
    4,
    (
        Method("avg", "FedAvg", "fedavg", paper=Cells(Cell(69.7, 0.3), Cell(86.2, 0.2), Cell(65, 0))),
        Method("sparse", "FedSparse", "fedsparse", {"lambda0": 1e-3}, Cells(sparsity=Cell(47))),
        Method("unpruned", "FedSparse, unpruned", "fedsparse", {"lambda0": 1e-3, "prune_server": False}),
    ),
    {"evaluate_every": 2},
    ("sparse", "unpruned"),
)


@pytest.fixture
def reproduce(monkeypatch, capsys, tmp_path, small_task):
    """Runs `fedprior reproduce tiny …` in an empty folder: (exit code, stdout, stderr)."""

    def tiny(seed: int, *, size: int = 6):
        task = small_task((size, size + 5, 2, 8, 9, 3))
        return fedprior.Task("tiny", task.network, task.data, task.defaults, options={"size": size})

    monkeypatch.setitem(fedprior.TASKS, "tiny", tiny)
    monkeypatch.setitem(EXPERIMENTS, "tiny", TINY)
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedprior", "reproduce", "tiny", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        out = capsys.readouterr()
        return exited.value.code, out.out, out.err

    return call


@pytest.fixture
def quick(monkeypatch):
    """No figures: they take seconds."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "figures" not in path.parts}


def test_reproduce_makes_runs_table_and_figures(reproduce, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra fedprior[report] is not installed")
    code, out, err = reproduce("--seeds", 2, "--out", "mine")
    assert (code, err) == (0, "")
    made = {
        label: [
            json.loads((tmp_path / "mine" / label / f"seed-{seed}" / "summary.json").read_text()) for seed in (0, 1)
        ]
        for label in ("avg", "sparse", "unpruned")
    }
    assert {s["rounds"] for summaries in made.values() for s in summaries} == {4}
    rows = list(csv.DictReader(io.StringIO((tmp_path / "mine" / "table.csv").read_text())))
    assert [row["label"] for row in rows] == ["avg", "sparse", "unpruned"]
    for row in rows:
        values = [100 * s["global_accuracy"] for s in made[row["label"]]]
        assert float(row["global_accuracy"]) == pytest.approx(statistics.mean(values))
        assert float(row["global_accuracy_error"]) == pytest.approx(statistics.stdev(values) / math.sqrt(2))
        sent = [(s["bytes_up"] + s["bytes_down"]) / 2**30 for s in made[row["label"]]]
        assert float(row["gib"]) == pytest.approx(statistics.mean(sent))
    assert (rows[0]["gib_paper"], rows[0]["global_accuracy_paper"], rows[1]["gib_paper"]) == ("65", "69.7", "")
    written = (tmp_path / "mine" / "table.md").read_text()
    mean = f"{float(rows[0]['global_accuracy']):.1f} ± {float(rows[0]['global_accuracy_error']):.1f}"
    assert f"| FedAvg | {mean} | 69.7 ± 0.3 |" in written
    assert re.search(rf"FedAvg\s+{re.escape(mean.replace(' ', ''))}\s+69\.7±0\.3", out)
    assert "6 clients, 4 rounds, seeds 0, 1, cpu" in written
    assert r"$69.7_{\pm 0.3}$" in (tmp_path / "mine" / "table.tex").read_text()
    figures = ["accuracy-gib", "accuracy-rounds", "partition", "server-pruning", "sparsity", "total-variation"]
    assert sorted(path.stem for path in (tmp_path / "mine" / "figures").glob("*.pdf")) == figures


def test_a_second_call_trains_nothing_and_a_third_only_new_runs(reproduce, tmp_path, quick):
    reproduce("--seeds", 1, "--out", "mine")
    before = contents(tmp_path)
    code, out, _ = reproduce("--seeds", 1, "--out", "mine")
    assert code == 0
    assert "3 of 3 runs are there already" in out
    assert contents(tmp_path) == before
    _, out, _ = reproduce("--seeds", "0,5", "--methods", "avg", "--out", "mine")
    assert "avg, seed 5: global" in out
    assert {path.name for path in (tmp_path / "mine" / "avg").iterdir()} == {"seed-0", "seed-5"}
    assert {path.name for path in (tmp_path / "mine" / "sparse").iterdir()} == {"seed-0"}


def test_an_interrupted_experiment_continues_to_the_same_records(reproduce, tmp_path, quick, monkeypatch):
    reproduce("--seeds", 1, "--out", "whole")
    plain_call = RunProgress.__call__

    def stop(self, record):
        plain_call(self, record)
        if record["round"] == 3 and len(list((tmp_path / "mine").rglob("summary.json"))) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunProgress, "__call__", stop)
    code, _, err = reproduce("--seeds", 1, "--out", "mine", "--set", "checkpoint_every=2")
    assert code == 130
    assert err == "stopped; the same `reproduce` with --out mine continues\n"
    monkeypatch.setattr(RunProgress, "__call__", plain_call)
    code, out, _ = reproduce("--seeds", 1, "--out", "mine")
    assert (code, "1 of 3 runs are there already" in out) == (0, True)
    for label in ("avg", "sparse", "unpruned"):
        one, other = (tmp_path / name / label / "seed-0" / "rounds.jsonl" for name in ("whole", "mine"))
        assert one.read_bytes() == other.read_bytes()


def test_a_diverged_run_is_reported_and_does_not_stop_the_others(reproduce, tmp_path, quick, monkeypatch):
    wild = Method("wild", "Wild", "fedavg", {"local_optimiser": "SGD(lr=1e20)"})
    monkeypatch.setitem(EXPERIMENTS, "tiny", Experiment("tiny", "Tiny", "tiny", 2, (wild, *TINY.methods[:1])))
    for _ in range(2):
        code, out, err = reproduce("--seeds", 1, "--out", "mine")
        assert (code, err) == (0, "")
        assert re.search(r"wild, seed 0: client \d diverged in round 2: .*; going on", out)
        assert re.search(r"- wild, seed 0: client \d diverged in round 2.*; not in the table", out)
        assert "Wild | – | – |" in (tmp_path / "mine" / "table.md").read_text()
    assert (tmp_path / "mine" / "avg" / "seed-0" / "summary.json").exists()
    assert not (tmp_path / "mine" / "wild" / "seed-0" / "summary.json").exists()


def test_table_only_needs_records_but_neither_weights_nor_the_task(reproduce, tmp_path, quick, monkeypatch):
    reproduce("--seeds", 2, "--out", "mine")
    before = {name: (tmp_path / "mine" / name).read_text() for name in ("table.md", "table.csv", "table.tex")}
    for path in [*(tmp_path / "mine").glob("table.*"), *(tmp_path / "mine").rglob("*.safetensors")]:
        path.unlink()
    shutil.move(tmp_path / "mine", tmp_path / "results")

    def gone(seed: int, *, size: int = 6):
        pytest.fail("the task was built")

    monkeypatch.setitem(fedprior.TASKS, "tiny", gone)
    code, _, err = reproduce("--table-only", "--out", "results")
    assert (code, err) == (0, "")
    assert {name: (tmp_path / "results" / name).read_text() for name in before} == before


def test_table_only_without_runs_is_refused_and_writes_nothing(reproduce, tmp_path, quick):
    (tmp_path / "empty").mkdir()
    for folder in ("nowhere", "empty"):
        code, _, err = reproduce("--table-only", "--out", folder)
        assert (code, err.count("\n")) == (2, 1)
        assert f"{folder} has no run of tiny" in err
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
    reproduce("--seeds", 1, "--methods", "avg", "--out", "mine")
    code, _, err = reproduce("--table-only", "--out", "mine/avg")
    assert (code, err.count("\n")) == (2, 1)
    assert "mine/avg has no run of tiny where they are kept" in err
    assert not (tmp_path / "mine" / "avg" / "table.md").exists()


def test_a_copied_run_does_not_count_as_another_seed(reproduce, tmp_path, quick):
    reproduce("--seeds", 1, "--methods", "avg", "--out", "mine")
    shutil.copytree(tmp_path / "mine" / "avg", tmp_path / "mine" / "avg-backup")
    code, out, _ = reproduce("--table-only", "--out", "mine")
    assert code == 0
    assert "mine/avg-backup/seed-0: it is avg, seed 0, which is kept in mine/avg/seed-0" in " ".join(out.split())
    (row,) = [row for row in csv.DictReader(io.StringIO((tmp_path / "mine" / "table.csv").read_text())) if row["gib"]]
    assert row["seeds"] == "1"


def test_runs_of_any_seed_are_compared_with_the_experiment(reproduce, tmp_path, quick):
    code, out, _ = reproduce("--seeds", "7,", "--methods", "avg", "--set", "size=7", "--out", "mine")
    assert code == 0
    assert "- with size=7" in out
    _, out, _ = reproduce("--table-only", "--out", "mine")
    assert "- avg, seed 7: size = 7, not 6" in out


def test_a_table_shows_other_methods_of_the_folder_too(reproduce, tmp_path, quick):
    reproduce("--seeds", 1, "--methods", "avg", "--out", "mine")
    reproduce("--seeds", 1, "--methods", "sparse", "--out", "mine")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "mine" / "table.csv").read_text())))
    assert [row["label"] for row in rows if row["gib"]] == ["avg", "sparse"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "lambda0=0.5"), "lambda0=0.001 is what makes sparse; leave sparse out"),
        (("--seeds", "20240101"), "would be 20,240,101 seeds; for that one seed write --seeds 20240101,"),
        (("--device", "tpu9"), "device 'tpu9' is not available"),
    ],
)
def test_likely_mistakes_are_refused_before_anything_is_written(reproduce, tmp_path, arguments, words):
    code, _, err = reproduce(*arguments, "--out", "mine")
    assert (code, err.count("\n")) == (2, 1)
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_the_table_has_notes_about_what_a_reader_should_know(reproduce, tmp_path, quick):
    reproduce("--seeds", 2, "--rounds", 2, "--out", "mine")
    (tmp_path / "mine" / "avg" / "seed-1" / "summary.json").unlink()
    (tmp_path / "mine" / "sparse" / "seed-1" / "config.toml").write_text("run = 1")
    config = tmp_path / "mine" / "unpruned" / "seed-1" / "config.toml"
    config.write_text(config.read_text().replace("lambda0 = 0.001", "lambda0 = 0.5"))
    code, out, _ = reproduce("--table-only", "--out", "mine", "--rounds", 2)
    assert code == 0
    said = " ".join(out.split())
    assert "2 rounds (the experiment has 4)" in said
    assert "- avg, seed 1: unfinished, 2 of 2 rounds; not in the table" in said
    assert re.search(r"- mine/sparse/seed-1: config.toml has no table \[run\]", said)
    assert "- unpruned, seed 1: lambda0 = 0.5, not 0.001" in said
    assert "- unpruned: its runs differ in lambda0" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--rounds", "5"), "rounds = 2, not 5"),
        (("--set", "size=7"), "size = 6, not 7"),
        (("--set", "temperature=0.5"), "temperature = 0.001, not 0.5"),
        (("--set", "batch_size=3"), "batch_size = 4, not 3"),
    ],
)
def test_runs_with_other_settings_are_not_mistaken_for_the_experiments(reproduce, tmp_path, quick, change, words):
    reproduce("--seeds", 1, "--rounds", 2, "--out", "mine")
    before = contents(tmp_path)
    code, _, err = reproduce("--seeds", 1, "--rounds", 2, *change, "--out", "mine")
    assert (code, err.count("\n")) == (2, 1)
    assert words in err
    assert contents(tmp_path) == before


def test_a_folder_with_other_content_is_not_touched(reproduce, tmp_path, quick):
    (tmp_path / "mine" / "avg" / "seed-0").mkdir(parents=True)
    (tmp_path / "mine" / "avg" / "seed-0" / "thesis.tex").write_text("mine")
    code, _, err = reproduce("--seeds", 1, "--out", "mine")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be continued" in err
    assert (tmp_path / "mine" / "avg" / "seed-0" / "thesis.tex").read_text() == "mine"


def test_without_matplotlib_there_is_a_table_and_one_line_about_figures(reproduce, tmp_path, quick):
    code, out, err = reproduce("--seeds", 1, "--methods", "avg", "--out", "mine")
    assert (code, err) == (0, "")
    assert "no figures: figures need matplotlib: pip install 'fedprior[report]'" in out
    assert (tmp_path / "mine" / "table.md").exists()


def test_an_unknown_experiment_or_method_is_a_one_line_error(reproduce, tmp_path):
    code, _, err = reproduce("--methods", "avg,spares")
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean 'sparse'" in err
    assert list(tmp_path.iterdir()) == []
