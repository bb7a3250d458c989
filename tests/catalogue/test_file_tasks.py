"""Own tasks from the command line: `fedprior run file.py:make_task`."""

import re
import shlex
import sys
import tomllib

import pytest

import fedprior
from fedprior import cli
from fedprior.report import read_run
from fedprior.runs.repeat import repeat_command

GOOD = '''
"""A user's file."""
from dataclasses import dataclass

import torch
from torch import nn

import fedprior
from neighbour import CLASSES


@dataclass
class Shape:
    inputs: int = 3


def make_task(hidden: int = 6, spread=0.5, *, seed, secret=Shape()):
    draw = torch.Generator().manual_seed(seed)
    x = spread * torch.randn(60, secret.inputs, generator=draw)
    y = torch.arange(60) % CLASSES
    x[torch.arange(60), y] += 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(secret.inputs, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))
    clients = fedprior.clients_from(x, y, partition="iid", clients=4, seed=seed)
    return fedprior.own_task(model, clients, name="mine", rounds=2, clients_per_round=2, batch_size=5)


def needs(width: int):
    return make_task(width, seed=0)


def broken():
    return 1 / 0


def refused():
    return fedprior.own_task(nn.Linear(3, 2), [])


def something():
    return [1, 2]


def leaves():
    raise SystemExit("bye")
'''


@pytest.fixture
def shell(monkeypatch, capsys, tmp_path):
    """Runs `fedprior …` beside the user's file: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    (tmp_path / "mine.py").write_text(GOOD)
    (tmp_path / "neighbour.py").write_text("CLASSES = 3\n")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedprior", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        out = capsys.readouterr()
        return exited.value.code, out.out, out.err

    return call


def test_an_own_task_is_run_resumed_evaluated_and_exported(shell, tmp_path, monkeypatch):
    code, out, err = shell("run", "mine.py:make_task", "--seed", 3, "--set", "hidden=5", "--set", "epochs=2")
    assert code == 0, err
    run = tmp_path / "runs" / "make_task-fedavg-3"
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["run"]["task"] == f"{tmp_path / 'mine.py'}:make_task"
    assert (config["task"]["hidden"], config["task"]["spread"], config["run"]["epochs"]) == (5, 0.5, 2)
    assert len(config["task"]["source_sha256"]) == 16
    assert set(config["task"]) == {"hidden", "spread", "source_sha256"}
    direct = fedprior.run(fedprior.task("mine.py:make_task", seed=3, hidden=5), "fedavg", epochs=2)
    assert read_run(run).rounds == direct.records

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the path was recorded in full
    assert shell("resume", run, "--rounds", 3)[0] == 0
    assert len(read_run(run).rounds) == 3
    code, out, _ = shell("evaluate", run)
    assert code == 0
    assert "accuracy" in out
    assert shell("export", run, "--to", "shipped", "--no-onnx")[0] == 0
    assert (tmp_path / "elsewhere" / "shipped" / "model.py").is_file()

    words = shlex.split(repeat_command(read_run(run)))
    assert words[:3] == ["fedprior", "run", f"{tmp_path / 'mine.py'}:make_task"]
    assert "hidden=5" in words
    assert shell(*words[1:], "--out", "again")[0] == 0
    assert read_run("again").rounds[-1] == read_run(run).rounds[-1]


def test_compare_and_sweep_take_own_tasks(shell, tmp_path):
    code, _, err = shell("compare", "mine.py:make_task", "--algorithms", "fedavg,fedprox", "--set", "precision=0.2")
    assert code == 0, err
    assert (tmp_path / "runs" / "compare-make_task" / "table.md").is_file()
    sweep = (
        "sweep",
        "mine.py:make_task",
        "--algorithm",
        "fedavg",
        "--seeds",
        "0,1",
        "--set",
        "hidden=4,5",
        "--out",
        "s",
    )
    assert shell(*sweep)[0] == 0
    assert sorted(p.name for p in (tmp_path / "s").iterdir() if p.is_dir()) == ["hidden=4", "hidden=5"]
    assert shell(*sweep)[0] == 0  # finished runs are left alone
    (tmp_path / "mine.py").write_text(GOOD.replace("spread=0.5", "spread=0.6"))
    code, _, err = shell(*sweep)
    assert code == 2
    assert "spread = 0.5, not 0.6" in err or "source_sha256" in err


def test_a_changed_file_does_not_resume_its_runs(shell, tmp_path):
    assert shell("run", "mine.py:make_task", "--out", "run")[0] == 0
    (tmp_path / "mine.py").write_text(GOOD + "\n# changed\n")
    code, _, err = shell("resume", "run", "--rounds", 3)
    assert code == 2
    assert "has changed since the run was started" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("nowhere.py:make_task", (), "there is no file nowhere.py"),
        ("mine.py", (), "name the function that makes it, such as mine.py:make_task"),
        ("mine.py:make-task", (), "name the function"),
        ("mine.py:make_tusk", (), "has no function 'make_tusk'; it has make_task, needs,"),
        ("mine.py:nn", (), "has no function 'nn'"),
        ("mine.py:needs", (), "needs needs width: --set width=…"),
        ("mine.py:broken", (), "ZeroDivisionError: division by zero"),
        ("mine.py:refused", (), "there are no clients"),
        ("mine.py:something", (), "something of .* returned a list; return a task"),
        ("mine.py:leaves", (), "SystemExit: bye"),
        ("mine.py:make_task", ("hiden=3",), "unknown setting 'hiden'; did you mean 'hidden'"),
        ("mine.py:make_task", ("hidden=many",), "hidden must be a whole number, got 'many'"),
        ("wrong.py:make_task", (), "wrong.py, line 2: SyntaxError"),
        ("fails.py:make_task", (), "fails.py, line 1: ModuleNotFoundError: No module named 'nonsense'"),
    ],
)
def test_a_wrong_file_function_or_setting_is_a_one_line_error(shell, tmp_path, name, settings, message):
    (tmp_path / "wrong.py").write_text("x = 1\ndef make_task(:\n")
    (tmp_path / "fails.py").write_text("import nonsense\n")
    code, _, err = shell("run", name, *(word for text in settings for word in ("--set", text)))
    assert code == 2
    assert len(err.strip().splitlines()) == 1, err
    assert re.search(message, err), err
    assert not (tmp_path / "runs").exists()
