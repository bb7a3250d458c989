"""The command line: what it prints, what it writes, and how it says no."""

import ast
import html
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fedprior
from fedprior import cli
from fedprior.catalogue.algorithms import algorithm_settings
from fedprior.catalogue.data.images import Scale
from fedprior.cli import experiments
from fedprior.core import locks
from fedprior.core.options import plain
from fedprior.report import read_run
from fedprior.report.jumps import Jump
from fedprior.runs.repeat import repeat_command
from fedprior_experiments.frontier import METHODS
from fedprior_experiments.reproduce import EXPERIMENTS


@pytest.fixture
def shell(monkeypatch, capsys, tmp_path):
    """Runs `fedprior …` in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedprior", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        out = capsys.readouterr()
        return exited.value.code, out.out, out.err

    return call


@pytest.fixture(autouse=True)
def tasks(monkeypatch, small_task):
    """A task that trains in milliseconds, and some that cannot be built."""

    def tiny(seed: int, *, size: int = 6):
        """Six clients with small images."""
        task = small_task((size, size + 5, 2, 8, 9, 3))
        return fedprior.Task("tiny", task.network, task.data, task.defaults, options={"size": size})

    def bad(model, *clients):
        def build(seed: int):
            return fedprior.own_task(model, clients)

        return build

    x, y = torch.ones(2, 3), torch.tensor([0, 1])
    linear, norm = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False))
    monkeypatch.setitem(fedprior.TASKS, "tiny", tiny)
    monkeypatch.setitem(fedprior.TASKS, "empty-client", bad(linear, (x, y), (x[:0], y[:0])))
    monkeypatch.setitem(fedprior.TASKS, "one-example", bad(linear, (x, y), (x[:1], y[:1])))
    monkeypatch.setitem(fedprior.TASKS, "label-range", bad(linear, (x, y), (x, y + 1)))
    monkeypatch.setitem(fedprior.TASKS, "batch-norm", bad(norm, (x, y), (x, y)))


# ---------------------------------------------------------------------- what works


def test_run_writes_a_folder_and_prints_its_numbers(shell, tmp_path):
    code, out, err = shell(
        *("run", "tiny", "--algorithm", "fedprox", "--rounds", 3, "--seed", 4, "--clients-per-round", 2),
        *("--device", "cpu", "--out", "mine", "--label", "prox-strong", "--set", "precision=0.5", "--set", "size=7"),
        *("--set", "local_optimiser=SGD(lr=0.1, momentum=0.5)", "--set", "epochs=2"),
    )
    assert (code, err) == (0, "")
    config = tomllib.loads((tmp_path / "mine" / "config.toml").read_text())
    assert config["algorithm"]["precision"] == 0.5
    assert config["algorithm"]["local_optimiser"] == "SGD(lr=0.1, momentum=0.5)"
    assert config["task"] == {"size": 7}
    for key, value in {"rounds": 3, "seed": 4, "clients_per_round": 2, "epochs": 2, "label": "prox-strong"}.items():
        assert config["run"][key] == value
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert table(out)["prox-strong"] == cells(summary)
    assert out.strip().endswith("mine")


def cells(summary):
    """A row of the table as the issue words it: accuracies in percent, megabytes up and down, sparsity."""
    percent = [f"{100 * summary[name]:.1f}%" for name in ("global_accuracy", "local_accuracy")]
    traffic = [f"{summary[name] / 1e6:,.1f}" for name in ("bytes_up", "bytes_down")]
    return [*percent, *traffic, f"{100 * summary['sparsity']:.1f}%", f"{summary['effective_parameters']:,}"]


def table(text):
    """{label: cells without the seconds} of a printed or markdown table."""
    rows = [re.split(r"\s{2,}|\s*\|\s*", line.strip(" |")) for line in text.splitlines()]
    return {row[0]: row[1:-1] for row in rows if len(row) == 8 and not row[1].startswith(("global", "-"))}


def test_compare_prints_and_writes_one_table_with_the_numbers_of_the_summaries(shell, tmp_path):
    code, out, err = shell("compare", "tiny", "--algorithms", "fedavg, fedsparse-unstructured", "--out", "both")
    assert (code, err) == (0, "")
    written = (tmp_path / "both" / "table.md").read_text()
    names = ["fedavg", "fedsparse-unstructured"]
    expected = {name: cells(json.loads((tmp_path / "both" / name / "summary.json").read_text())) for name in names}
    assert table(out) == table(written) == expected
    assert list(table(written)) == names
    assert "global acc." in written
    assert re.search(r"^tiny, 5 rounds, seed 0", written)
    assert "both/report.html" in out
    assert "fedsparse-unstructured" in (tmp_path / "both" / "report.html").read_text()


def test_report_writes_page_figures_and_tables_and_names_what_it_left_out(shell, tmp_path):
    shell("run", "tiny", "--out", "one")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.toml").write_text("rounds = ")
    code, out, err = shell("report", "one", "half", "--figures", "figures", "--tables", "tables")
    assert (code, err) == (0, "")
    assert "left out: half: config.toml is damaged" in out
    assert (tmp_path / "report.html").exists()
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {"table.md", "table.tex", "table.csv"}
    assert {"accuracy-bytes.png", "accuracy-rounds.svg"} <= {path.name for path in (tmp_path / "figures").iterdir()}
    assert shell("report", "half")[::2] == (
        2,
        "error: there is nothing to report: half: config.toml is damaged: Invalid value (at end of document)\n",
    )


def test_the_command_on_the_page_repeats_the_run(shell, tmp_path):
    shell(
        *("run", "tiny", "--algorithm", "fedsparse", "--out", "one", "--label", "my own", "--seed", 5),
        *("--set", "size=7", "--set", "lambda0=1e-3", "--set", "server_optimiser=none", "--set", "structured=false"),
    )
    shell("report", "one")
    text = re.search(r"<pre[^>]*>(fedprior run .*?)</pre>", (tmp_path / "report.html").read_text()).group(1)
    command = shlex.split(html.unescape(text))
    assert shell(*command[1:], "--out", "two")[0] == 0
    for name in ("config.toml", "rounds.jsonl", "partition.json"):
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text()


def test_the_repeat_command_names_a_default_that_the_task_overrides(tmp_path):
    task = fedprior.task("mnist-mini", clients=3)
    general = fedprior.algorithm("fedavg", task.network)  # without the Adam that the task has for it
    fedprior.run(task, general, rounds=1, clients_per_round=1, local_steps=1, batch_size=32, out=tmp_path / "run")
    words = shlex.split(repeat_command(read_run(tmp_path / "run")))
    default = algorithm_settings("fedavg", {})["server_optimiser"]
    assert f"server_optimiser={plain(default)}" in words
    assert "batch_size=32" in words


def test_labels_and_paths_may_contain_any_characters(shell, tmp_path):
    label = '[/b] """ | \\ {x} [bold]'
    code, out, err = shell("run", "tiny", "--algorithm", "fedsparse", "--out", "[a]", "--label", label)
    assert (code, err) == (0, "")
    assert label in out
    assert out.rstrip().endswith("[a]")
    for words in (("watch", "[a]", "--once"), ("evaluate", "[a]"), ("export", "[a]", "--to", "[small]", "--no-onnx")):
        code, out, err = shell(*words)
        assert (code, err) == (0, "")
        assert '[/b] """' in out
    # The label stands in the docstring of model.py, and nowhere else.
    assert label in ast.get_docstring(ast.parse((tmp_path / "[small]" / "model.py").read_text()))


def test_a_sweep_names_its_seeds_and_says_when_all_diverge(shell, tmp_path):
    assert shell("sweep", "tiny", "--algorithm", "fedavg", "--seeds", "0,1", "--rounds", 1, "--out", "good")[0] == 0
    table = (tmp_path / "good" / "table.md").read_text()
    assert "seed 0, 1, cpu" in table
    assert "| fedavg (0) |" in table
    assert "| fedavg (1) |" in table
    wild = ("--set", "local_optimiser=SGD(lr=1e30)")
    code, _, err = shell("sweep", "tiny", "--algorithm", "fedavg", "--seeds", "0", *wild, "--out", "bad")
    assert code == 2
    assert "fedavg, seed 0" in err
    assert "every run of the sweep diverged" in err


def test_a_size_means_fednarrow_and_says_so(shell, tmp_path):
    code, out, err = shell("run", "tiny", "--sparsity", "0.5", "--out", "half")
    assert (code, err) == (0, "")
    assert "asked for a size: fednarrow, a network narrowed before training" in out
    assert 'algorithm = "fednarrow"' in (tmp_path / "half" / "config.toml").read_text()
    assert "sparsity = 0.5" in (tmp_path / "half" / "config.toml").read_text()
    code, out, err = shell("compare", "tiny", "--budget", "20kB", "--out", "both")
    assert (code, err) == (0, "")
    sent = json.loads((tmp_path / "both" / "fednarrow" / "summary.json").read_text())
    assert sent["bytes_up"] + sent["bytes_down"] <= 20_000
    assert f"{100 * float(out.split('fednarrow: ')[1].split('%')[0]) / 100:.1f}% sparsity for 20,000 bytes" in out
    for wrong, words in (
        (("--sparsity", "0.5", "--max-parameters", "9"), "set the same thing: use only one"),
        (("--algorithm", "fedavg", "--budget", "1MB"), "--budget is for fednarrow and fedsparse-sized"),
        (("--budget", "1KB"), "such as 5GiB or 800MB, in B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, got '1KB'"),
        (("--algorithm", "fedavg", "--sparsity", "0.5"), "sparsity is a setting of fedsparse-sized, fednarrow"),
        (("--algorithm", "fedsparse+scaffold", "--sparsity", "0.5"), "λ₀ (lambda0=5e-6) decides how many gates close"),
        (("--algorithm", "fedsparse", "--sparsity", "0.5", "--set", "lambda0=1e-6"), "not of fedsparse-sized"),
        (("--algorithm", "fedsparse+scaffold", "--budget", "1MB"), "or fednarrow"),
        (("--algorithm", "fedsparse-unstructured", "--set", "max_parameters=9"), "or fednarrow"),
    ):
        code, _, err = shell("run", "tiny", *wrong, "--out", "wrong")
        assert code == 2
        assert words in err


def test_a_lambda0_at_the_watershed_causes_a_one_line_warning(shell, small_task):
    """κ logit 0.99 = 4.6e-4; of three layers the one whose groups have n weights is warned of at λ₀ = 4.6e-4 / n."""
    sizes = fedprior.algorithm("fedsparse", small_task().network).prior.gating.sizes()
    layer, n = max(sizes.items(), key=lambda one: one[1])
    others = [other for other, size in sizes.items() if not 0.75 < size / n < 1.33 and other != layer]
    assert others
    edge = 1e-4 * math.log(99) / n
    for near in (0.85, 1.15):
        options = ("--algorithm", "fedsparse", "--set", f"lambda0={near * edge}", "--rounds", "1")
        code, _, err = shell("run", "tiny", *options)
        assert (code, err.count("\n")) == (0, 1)
        assert f"at the watershed of {layer}: " in err
        assert f"take lambda0 below {0.8 * edge:.1e} or above {1.2 * edge:.1e}" in err
        assert not any(other in err for other in others)
    for far in (0.75, 1.25):
        code, _, err = shell("run", "tiny", "--algorithm", "fedsparse", "--set", f"lambda0={far * edge}")
        assert (code, err) == (0, "")


def test_export_predict_and_evaluate(shell, tmp_path, monkeypatch):
    shell("run", "tiny", "--algorithm", "fedsparse", "--out", "run", "--set", "lambda0=1e-2")
    code, out, err = shell("export", "run", "--to", "small", "--no-onnx")
    assert (code, err) == (0, "")
    for words in ("parameters", "bytes", "multiply-adds", "milliseconds", "outputs equal", "small"):
        assert words in out
    sizes = json.loads((tmp_path / "small" / "model.json").read_text())["sizes"]
    assert f"{sizes['compact']['parameters']:,}" in out
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(25, 1, 8, 8)).astype(np.float32))
    code, out, err = shell("predict", "small", "x.npy", "--out", "found.csv")
    assert (code, err) == (0, "")
    assert "and 5 more" in out
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 26
    code, out, err = shell("evaluate", "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (code, err) == (0, "")
    assert f"{100 * summary['global_accuracy']:.2f}%" in out
    code, out, err = shell("evaluate", "run", "--personalise", 1)
    assert (code, err) == (0, "")
    assert "client 1's own model" in out
    assert "the server's, on the same" in out
    for arguments, words in (
        (("export", "run", "--to", "small"), "small exists; choose another folder"),
        (("evaluate", "run", "--personalise", 9), "there is no client 9"),
        (("evaluate", "run", "--data", "nothing.npz"), "nothing.npz does not exist"),
        (("predict", "run", "x.npy"), "run is not an exported model"),
    ):
        code, _, err = shell(*arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert words in err
    monkeypatch.setattr("fedprior.trained.compact.onnx.available", lambda: False)
    assert "pip install 'fedprior[export]'" in shell("export", "run", "--to", "other", "--onnx")[2]


def test_doubtful_pixels_cause_a_one_line_warning(shell, tmp_path, monkeypatch, small_task):
    monkeypatch.setattr("fedprior.trained.compact.export_folder.fastest", lambda calls: [1.0] * len(calls))
    task = small_task()
    scale = Scale((0.4,), (0.2,))
    monkeypatch.setitem(
        fedprior.TASKS, "grey", lambda seed: fedprior.Task("grey", task.network, task.data, scale=scale)
    )
    shell("run", "grey", "--rounds", 1, "--out", "run")
    assert shell("export", "run", "--to", "small", "--no-onnx")[0] == 0
    pixels, y = np.random.default_rng(0).integers(0, 256, (6, 1, 8, 8), np.uint8), np.arange(6) % 4
    inputs = ((pixels / 255 - 0.4) / 0.2).astype(np.float32)
    found = []
    for x in (inputs, pixels, np.moveaxis(pixels, 1, -1), pixels[:, 0]):
        np.savez(tmp_path / "data.npz", x=x, y=y)
        predicted, evaluated = shell("predict", "small", "data.npz"), shell("evaluate", "run", "--data", "data.npz")
        assert (predicted[0], predicted[2], evaluated[0], evaluated[2]) == (0, "", 0, "")
        found.append((predicted[1], evaluated[1]))
    assert found == found[:1] * 4
    np.save(tmp_path / "unit.npy", pixels / 255)
    np.save(tmp_path / "real.npy", pixels * 1.0)
    code, _, err = shell("predict", "small", "unit.npy")
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("warning: unit.npy holds numbers from 0 to 1, used as inputs without scaling")
    code, _, err = shell("predict", "small", "real.npy")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: real.npy holds numbers from 0 to 255")


def test_watch_shows_the_current_state(shell):
    shell("run", "tiny", "--out", "run")
    code, out, err = shell("watch", "run", "--once")
    assert (code, err) == (0, "")
    assert "5/5" in out
    assert "finished" in out
    assert shell("watch", "nope", "--once") == (2, "", "error: there is no run in nope\n")


@pytest.mark.parametrize(
    ("words", "at", "said"),
    [
        (("run", "tiny"), "Session.finish", "`fedprior resume all` continues at its last checkpoint"),
        (("run", "tiny"), "Session.note", "`fedprior resume all` starts it again, for want of a checkpoint"),
        (("compare", "tiny"), "Session.note", "`fedprior resume all/fedavg` starts it again, for want of a checkpoint"),
        (("sweep", "tiny"), "Session.note", "the same `sweep` with --out all continues"),
        (("frontier", "tiny", "--small"), "Session.note", "the same `frontier` with --out all continues"),
    ],
)
def test_an_interrupt_says_how_this_run_goes_on(shell, monkeypatch, words, at, said):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"fedprior.runs.drive.{at}", interrupted)
    code, _, err = shell(*words, "--out", "all")
    assert (code, err) == (130, f"stopped; {said}\n")


def test_tensorboard_is_optional_and_its_error_says_how_to_install_it(shell, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    code, _, err = shell("run", "tiny", "--out", "run", "--tensorboard", "board")
    assert (code, err.count("\n")) == (2, 1)
    assert "pip install 'fedprior[tensorboard]'" in err
    assert list(tmp_path.iterdir()) == [], "nothing was trained"


def test_compare_starts_all_algorithms_from_the_same_weights(shell, tmp_path):
    shell("compare", "tiny", "--algorithms", "fedavg,fedprox", "--set", "precision=0", "--out", "both")
    one, other = ((tmp_path / "both" / name / "rounds.jsonl").read_text() for name in ("fedavg", "fedprox"))
    assert one == other


def test_without_out_folders_are_numbered_and_never_reused(shell, tmp_path):
    for _ in range(2):
        assert shell("run", "tiny", "--rounds", 1)[0] == 0
        assert shell("compare", "tiny", "--algorithms", "fedavg", "--rounds", 1)[0] == 0
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert names == {"tiny-fedavg-0", "tiny-fedavg-0-2", "compare-tiny", "compare-tiny-2"}


def test_resume_continues_and_prints_the_table(shell, tmp_path):
    shell("run", "tiny", "--out", "whole", "--set", "checkpoint_every=2")
    shell("run", "tiny", "--out", "run", "--set", "checkpoint_every=2")
    for name in ("summary.json", "model.safetensors", "checkpoint.safetensors"):
        (tmp_path / "run" / name).unlink()
    code, out, err = shell("resume", "run")
    assert (code, err) == (0, "")
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert table(out)["fedavg"] == cells(json.loads((tmp_path / "run" / "summary.json").read_text()))


def test_rollback_puts_a_run_back_and_says_how_to_go_on(shell, tmp_path):
    shell("run", "tiny", "--out", "run", "--set", "keep_every=1")
    whole = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    code, out, err = shell("rollback", "run", "--to", 1)
    assert (code, out, err) == (0, "run is back at round 1; go on with fedprior resume run\n", "")
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == whole.splitlines(keepends=True)[0]
    code, out, err = shell("rollback", "run", "--to", 2)
    assert (code, out, err) == (2, "", "error: run keeps no checkpoint of round 2: it keeps 1\n")
    assert shell("resume", "run")[::2] == (0, "")
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == whole
    for wrong in (("rollback", "run"), ("rollback", "nowhere", "--to", 1), ("rollback", "run", "--to", "one")):
        code, out, err = shell(*wrong)
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_jump_of_the_loss_is_one_line(shell, monkeypatch):
    seen = Jump(2, 2, (9.0, 8.0, 7.0), 1.0)
    monkeypatch.setattr("fedprior.runs.drive.seen_now", lambda records: seen if len(records) == 2 else None)
    code, _, err = shell("run", "tiny", "--out", "mine")
    what = "the loss jumped in round 2: 9, 8 and 7, where 1 was usual; no checkpoint is kept from before"
    assert (code, err) == (0, f"warning: {what}\n")


def test_uploads_that_were_left_out_are_one_line(shell):
    hostile = ("--set", "attack=scale", "--set", "attackers=0.2", "--set", "clients_per_round=6")
    code, out, _ = shell("run", "tiny", "--rounds", 2, "--out", "run", *hostile)
    assert code == 0
    assert "fedavg: 2 uploads of 1 client were left out, farther away than `bound` allows: see `faults` in run" in out
    assert "were left out" in shell("resume", "run", "--rounds", 3)[1]
    assert "were left out" not in shell("run", "tiny", "--rounds", 2, "--out", "clean")[1]
    code, _, err = shell("run", "tiny", "--set", "bound=0.5")
    assert (code, "bound must be 0 or at least 1, got 0.5" in err) == (2, True)


def test_resume_with_more_rounds_and_a_run_that_stops_early(shell, tmp_path):
    shell("run", "tiny", "--out", "mine", "--rounds", 2)
    code, out, err = shell("resume", "mine", "--rounds", 4)
    assert (code, err) == (0, "")
    assert "tiny, 4 rounds" in out
    code, out, err = shell("resume", "mine", "--rounds", 3)
    assert (code, out) == (2, "")
    assert err == "error: mine has 4 rounds already: --rounds must be at least that, got 3\n"
    early = ("--set", "patience=1", "--set", "keep=best", "--set", "by=-sparsity", "--set", "evaluate_every=1")
    code, _, err = shell("run", "tiny", "--out", "early", "--rounds", 9, *early)
    assert (code, err) == (0, "")
    summary = json.loads((tmp_path / "early" / "summary.json").read_text())
    assert summary["stopped"] == "no better sparsity in 1 evaluations"
    assert (summary["rounds"], summary["best_round"]) == (2, 1)
    assert (tmp_path / "early" / "best.safetensors").exists()


def test_set_reaches_every_option_that_has_a_flag(shell, tmp_path):
    shell("run", "tiny", "--out", "flags", "--seed", 3, "--rounds", 2, "--clients-per-round", 2, "--device", "cpu")
    given = [f"--set={pair}" for pair in ("seed=3", "rounds=2", "clients_per_round=2", "device=cpu")]
    assert shell("run", "tiny", "--out", "sets", *given)[0] == 0
    for name in ("config.toml", "rounds.jsonl"):
        assert (tmp_path / "flags" / name).read_text() == (tmp_path / "sets" / name).read_text()


def test_with_a_size_fedsparse_is_the_one_that_learns_what_fits(shell, tmp_path):
    size = ("--set", "sparsity=0.5")
    code, out, err = shell("compare", "tiny", "--algorithms", "fedavg,fedsparse", *size, "--rounds", 2, "--out", "both")
    assert (code, err) == (0, "")
    assert "asked for a size: fedsparse is fedsparse-sized" in out
    assert 'algorithm = "fedsparse-sized"' in (tmp_path / "both" / "fedsparse-sized" / "config.toml").read_text()
    code, _, err = shell("compare", "tiny", "--algorithms", "fedsparse,fedsparse-sized", "--sparsity", "0.5")
    assert code == 2
    assert "different names" in err


@pytest.mark.parametrize("seed", [-1, 2**32, 2**63 - 1])
def test_any_64_bit_seed_is_accepted(shell, seed):
    assert (
        shell("run", "mnist-mini", "--seed", seed, "--rounds", 1, "--set", "clients=5000", "--set", "alpha=1e6")[0] == 0
    )


def test_tasks_and_algorithms_are_listed_with_their_settings(shell):
    code, out, err = shell("tasks")
    assert (code, err) == (0, "")
    assert "mnist-mini" in out
    assert "alpha=10.0" in out
    code, out, err = shell("algorithms")
    assert (code, err) == (0, "")
    for name in fedprior.ALGORITHMS:
        assert re.search(rf"^{re.escape(name)}\s+prior:", out, re.MULTILINE)
    assert "lambda0=5e-06" in out
    assert "local_optimiser=SGD(lr=0.05)" in out


def test_the_settings_of_one_algorithm_or_task_are_explained(shell):
    code, out, err = shell("algorithms", "fednarrow")
    assert (code, err) == (0, "")
    for row in (
        r"dense_rounds +none +\(0; of.*rounds +before",
        "sparsity .* share of +parameters",
        "floor +1 +the +least",
    ):
        assert re.search(row, " ".join(out.split()))
    code, out, err = shell("tasks", "mnist-mini")
    assert (code, err) == (0, "")
    assert re.search("pixels +standard +how images are scaled: standard", out)


def test_version_and_help(shell):
    assert shell("--version") == (0, f"{fedprior.__version__}\n", "")
    code, out, _ = shell()
    assert code == 0
    commands = "run compare resume reproduce tasks algorithms report watch export predict evaluate"
    for command in commands.split():
        assert command in out
    assert "--clients-per-round" in shell("run", "--help")[1]


# ---------------------------------------------------------------------- how it says no

BAD = {
    "unknown task": (("run", "mnist-mimi"), "unknown task 'mnist-mimi'; did you mean 'mnist-mini'?"),
    "unknown task to explain": (("tasks", "mnist-mimi"), "unknown task 'mnist-mimi'; did you mean 'mnist-mini'?"),
    "unknown algorithm to explain": (("algorithms", "fedspare"), "did you mean 'fedsparse'?"),
    "unknown task to compare": (("compare", "tinny"), "did you mean 'tiny'?"),
    "unknown algorithm": (("run", "tiny", "--algorithm", "fedspare"), "did you mean 'fedsparse'?"),
    "unknown algorithm to compare": (("compare", "tiny", "--algorithms", "fedavg,fedaadm"), "did you mean 'fedadam'?"),
    "an algorithm twice": (("compare", "tiny", "--algorithms", "fedavg,fedavg"), "different names"),
    "no algorithms": (("compare", "tiny", "--algorithms", ","), "different names"),
    "unknown setting": (("run", "tiny", "--set", "bath_size=3"), "did you mean 'batch_size'?"),
    "setting of another algorithm": (("run", "tiny", "--set", "lambda0=1"), "lambda0 is a setting of fedsparse, "),
    "setting without a value": (("run", "tiny", "--set", "rounds"), "--set takes key=value, got 'rounds'"),
    "rounds in words": (("run", "tiny", "--rounds", "ten"), "--rounds"),
    "no rounds": (("run", "tiny", "--rounds", "0"), "rounds must be at least 1, got 0"),
    "seed in words": (("run", "tiny", "--seed", "lucky"), "--seed"),
    "seed too large": (("run", "tiny", "--seed", str(2**64)), "seed must fit in 64 bits"),
    "empty cohorts": (("run", "tiny", "--clients-per-round", "-2"), "clients_per_round must be at least 1, got -2"),
    "more than all": (
        ("run", "tiny", "--clients-per-round", "7"),
        "clients_per_round is 7, but there are only 6 clients",
    ),
    "no such device": (("run", "tiny", "--device", "abacus"), "device 'abacus' is not available"),
    "set: type": (("run", "tiny", "--set", "epochs=1.5"), "epochs must be a whole number, got '1.5'"),
    "set: range": (("run", "tiny", "--set", "batch_size=0"), "batch_size must be at least 1"),
    "set: choice": (("run", "tiny", "--set", "mode=both"), "mode must be auto, in-turn, vectorised or captured"),
    "set: optimiser": (
        ("run", "tiny", "--set", "local_optimiser=SGD(lr=)"),
        "an optimiser is written like SGD(lr=0.05)",
    ),
    "set: task's type": (("run", "tiny", "--set", "size=big"), "size must be a whole number, got 'big'"),
    "set: task's range": (("run", "mnist-mini", "--set", "alpha=-1"), "alpha must be above 0"),
    "set: infinite": (("run", "mnist-mini", "--set", "alpha=inf"), "alpha must be a number, got 'inf'"),
    "set: too many clients": (("run", "mnist-mini", "--set", "clients=20000"), "20000 clients cannot share 10000"),
    "set: one example each": (("run", "mnist-mini", "--set", "clients=9000"), "client 0 has only 1 training example"),
    "set: second algorithm": (("compare", "tiny", "--set", "lambda0=-1"), "lambda0 must be at least 0"),
    "empty client": (("run", "empty-client"), "client 1 has no training examples"),
    "one example": (("run", "one-example"), "client 1 has only 1 training example"),
    "label out of range": (
        ("run", "label-range"),
        "client 1 has the training label 2, but labels must lie between 0 and 1",
    ),
    "batch norm": (("run", "batch-norm"), "Set track_running_stats=True"),
    "resume nothing": (("resume", "nowhere"), "nowhere is not a run: it has no config.toml"),
    "no command": (("dance",), "dance"),
    "a command misspelt": (("rn", "tiny"), "error: unknown command 'rn'; did you mean 'run'?\n"),
    "a folder of data for none": (
        ("run", "mnist-mini", "--data-dir", "/nope"),
        "mnist-mini has no --data-dir: its data",
    ),
    "no argument": (("run",), "Missing argument"),
    "no such option": (("run", "tiny", "--fast"), "--fast"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_with_exit_code_2_and_leaves_no_files(shell, tmp_path, case):
    arguments, words = BAD[case]
    code, out, err = shell(*arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert words in err
    assert list(tmp_path.iterdir()) == [], "nothing was written"


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("run", "rounds", 5),
        ("run", "seed", 5),
        ("run", "device", "cpu"),
        ("run", "wire", "int8"),
        ("run", "clients_per_round", 2),
        ("run", "sparsity", 0.5),
        ("run", "max_parameters", 100),
        ("compare", "rounds", 5),
        ("sweep", "rounds", 5),
        ("sweep", "wire", "int4,int8"),
        ("frontier", "device", "cpu"),
    ],
)
def test_a_setting_with_an_option_cannot_be_given_twice(shell, tmp_path, command, option, value):
    """`--rounds 1 --set rounds=5` ran 5; also where both say the same, or what is the default."""
    flag = f"--{option.replace('_', '-')}"
    for order in (1, -1):
        words = [(flag, {"device": "auto", "wire": "float32"}.get(option, 1)), ("--set", f"{option}={value}")][::order]
        code, out, err = shell(command, "tiny", *words[0], *words[1], "--out", "mine")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err == f"error: {flag} and --set {option}=… are the same setting: use only one\n"
    assert list(tmp_path.iterdir()) == []


def test_set_twice_with_two_values_is_refused(shell, tmp_path):
    code, _, err = shell("run", "tiny", "--out", "mine", "--set", "rounds=1", "--set", "rounds=5")
    assert (code, err) == (2, "error: --set rounds=… is given twice, as 1 and as 5: use only one\n")
    assert list(tmp_path.iterdir()) == []
    assert shell("run", "tiny", "--out", "mine", "--set", "rounds=1", "--set", "rounds=1")[0] == 0


def test_without_a_terminal_progress_is_a_line_every_few_seconds(shell, monkeypatch):
    """The clock goes by two seconds whenever somebody looks."""
    clock = itertools.count(0, 2)
    monkeypatch.setattr("fedprior.report.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    code, out, err = shell("run", "tiny", "--out", "mine", "--rounds", 12, "--label", "mine [all]")
    assert (code, err) == (0, "")
    lines = re.findall(r"^mine \[all\]  (\d+)/12  (?:accuracy .*%  )?loss \d+\.\d+  \d+ MB$", out, re.MULTILINE)
    assert lines == ["3", "6", "9", "12"]
    assert out.startswith("fedavg: SGD(lr=")  # the optimisers come first
    assert "accuracy" in out.split("12 rounds")[0]


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_adds_the_traceback(shell, place):
    arguments = ["run", "tiny", "--rounds", "0"]
    code, _, err = shell(*(["--debug", *arguments] if place == "before" else [*arguments, "--debug"]))
    assert code == 2
    assert "Traceback (most recent call last)" in err
    assert "SettingError: rounds must be at least 1, got 0" in err
    assert err.splitlines()[-1] == "error: rounds must be at least 1, got 0"


def test_an_existing_folder_is_not_overwritten(shell, tmp_path):
    shell("run", "tiny", "--rounds", 1, "--out", "mine")
    shell("compare", "tiny", "--rounds", 1, "--algorithms", "fedavg", "--out", "both")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for arguments in (
        ("run", "tiny", "--out", "mine"),
        ("run", "tiny", "--out", "both"),
        ("run", "tiny", "--out", "mine/config.toml"),
        ("compare", "tiny", "--out", "mine"),
        ("compare", "tiny", "--algorithms", "fedprox", "--out", "both"),
    ):
        code, _, err = shell(*arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert re.search(r"exists; .*another folder \(--out\)", err)
    assert "error: both exists; it holds runs, each continued like `fedprior resume both/fedavg`; or choose" in err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("command", "first"),
    [
        (("run", "tiny", "--out", "all"), "all"),
        (("compare", "tiny", "--out", "all"), "all/fedavg"),
        (("sweep", "tiny", "--algorithm", "fedavg", "--seeds", "0,1", "--out", "all"), "all/fedavg/seed-1"),
        (("frontier", "tiny", "--methods", "fedavg,narrow,fedl1", "--small", "--out", "all"), "all/fedl1-int4/seed-0"),
    ],
)
def test_a_folder_in_use_by_another_process_is_a_one_line_error(shell, tmp_path, monkeypatch, command, first):
    """The second of two terminals; of a sweep, nothing is trained when any of its runs is another's."""
    with locks.alone_in([tmp_path / first]):
        with monkeypatch.context() as later:  # `compare` refuses a folder that is there when it begins
            later.setattr("fedprior.cli.runs._check_unused", lambda folders: None)
            code, _, err = shell(*command)
        assert (code, err.count("\n")) == (2, 1)
        assert f"{first} is being trained by process {os.getpid()} on " in err
        assert not list(tmp_path.rglob("config.toml"))
    assert shell(*command)[::2] == (0, "")


def test_a_broken_or_foreign_checkpoint_is_a_one_line_error_and_nothing_is_lost(shell, tmp_path):
    shell("run", "tiny", "--algorithm", "fedsparse", "--out", "mine")
    shell("run", "tiny", "--algorithm", "fedavg", "--out", "other")
    path = tmp_path / "mine" / "checkpoint.safetensors"
    data = path.read_bytes()
    for damaged in (data[:-1], b"", os.urandom(500), (tmp_path / "other" / "checkpoint.safetensors").read_bytes()):
        path.write_bytes(damaged)
        before = {file: file.read_bytes() for file in path.parent.rglob("*.*")}
        code, out, err = shell("resume", "mine")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "checkpoint.safetensors" in err
        assert {file: file.read_bytes() for file in path.parent.rglob("*.*")} == before
    path.write_bytes(data)
    config = tmp_path / "mine" / "config.toml"
    text = config.read_text()
    for damaged in ("rounds = ", text.replace('algorithm = "fedsparse"', 'algorithm = "fedsprase"'), "run = 1\n"):
        config.write_text(damaged)
        code, out, err = shell("resume", "mine")
        assert (code, out, err.count("\n")) == (2, "", 1)
    config.write_text(text)
    assert shell("resume", "mine")[0] == 0


def test_a_diverged_run_names_client_and_round_and_can_be_resumed_with_a_lower_rate(shell, tmp_path):
    arguments = ("--out", "mine", "--set", "local_optimiser=SGD(lr=1e20)", "--set", "bound=0")
    code, out, err = shell("run", "tiny", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.match(r"error: client [0-5] diverged in round 1: .*lower the learning rates", err)
    assert (tmp_path / "mine" / "checkpoint.safetensors").exists()
    assert (tmp_path / "mine" / "rounds.jsonl").read_text() == ""
    config = tmp_path / "mine" / "config.toml"
    config.write_text(config.read_text().replace("SGD(lr=1e+20)", "SGD(lr=0.05)"))
    assert shell("resume", "mine")[0] == 0
    shell("run", "tiny", "--out", "calm", "--set", "bound=0")
    assert (tmp_path / "mine" / "rounds.jsonl").read_text() == (tmp_path / "calm" / "rounds.jsonl").read_text()


# ---------------------------------------------------------------------- as a program


LOADED = """
import sys
from fedprior import cli
sys.argv = ["fedprior", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as exited:
    assert exited.code == 0, exited.code
print(*(name for name in ("torch", "numpy", "matplotlib") if name in sys.modules), file=sys.stderr)
"""


def test_version_and_help_do_not_import_torch():
    """Which takes seconds."""
    commands = ("--version", "--help", "algorithms --help", "run --help", "reproduce --help", "export --help")
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-c", LOADED, *command.split()], capture_output=True, text=True, check=True
        )
        assert done.stderr == "\n", command
        assert done.stdout


def test_help_lists_tasks_and_algorithms():
    """Written down in the command line, which does not import it."""
    assert experiments.EXPERIMENTS.split(", ") == list(EXPERIMENTS)
    assert experiments.METHODS.split(",") == list(METHODS)


def test_importing_the_package_builds_no_optimiser():
    """A check takes a step, and torch loads much for the first one."""
    code = (
        "import sys, fedprior; fedprior.run, fedprior.TASKS, fedprior.ALGORITHMS; print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_package_has_every_name_it_exports():
    assert set(fedprior.__all__) <= set(dir(fedprior))
    for name in fedprior.__all__:
        assert getattr(fedprior, name) is not None
    assert fedprior.priors.Gaussian
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fedprior.nothing


def test_presets_pass_the_checks_they_skip():
    presets = {
        str(value): value
        for name in fedprior.ALGORITHMS
        for value in algorithm_settings(name, {}).values()
        if isinstance(value, fedprior.Optimiser)
    }
    for preset in presets.values():
        assert fedprior.Optimiser(preset.name, preset.settings) == preset


def test_an_interrupted_program_prints_one_line_and_can_be_resumed(tmp_path):
    command = [sys.executable, "-m", "fedprior", "run", "mnist-mini", "--out", str(tmp_path / "run")]
    command += ["--rounds", "500", "--clients-per-round", "1", "--set", "clients=500", "--set", "checkpoint_every=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has them ignore interrupts, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        while process.poll() is None and not (tmp_path / "run" / "checkpoint.safetensors").exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    # The optimisers are printed with the first record, just after the checkpoint that the interrupt waited for.
    assert out == "" or out.startswith("fedavg: SGD(lr=0.05) at the clients, ")
    assert "\x1b" not in out, "no progress bar where there is no terminal"
    assert err == f"stopped; `fedprior resume {tmp_path / 'run'}` continues at its last checkpoint\n"
    bad = subprocess.run(
        [sys.executable, "-m", "fedprior", "resume", str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert "Traceback" not in bad.stderr


def test_precision_on_the_command_line(shell, tmp_path):
    assert shell("run", "tiny", "--rounds", 1, "--wire", "int8/int4", "--out", "narrow")[0] == 0
    assert 'wire = "int8/int4"' in (tmp_path / "narrow" / "config.toml").read_text()
    assert (
        shell("sweep", "tiny", "--seeds", "0", "--rounds", 1, "--wire", "float32,int8/int4", "--out", "swept")[0] == 0
    )
    sizes = [
        json.loads((tmp_path / "swept" / f"wire={wire}" / "seed-0" / "summary.json").read_text())["bytes_up"]
        for wire in ("float32", "int8_int4")
    ]
    assert sizes[1] < 0.4 * sizes[0]
    code, _, err = shell("compare", "tiny", "--wire", "int3", "--out", "none")
    assert code == 2
    assert "wire must be float32, float16, bfloat16, int8, int4, or two of them as DOWN/UP, got 'int3'" in err
    assert not (tmp_path / "none").exists()
