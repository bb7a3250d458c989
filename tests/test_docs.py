"""The code in the documents is run as it stands."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import fedprior
from fedprior.priors import Assignment

DOCS = Path(__file__).parents[1] / "docs"


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL)


def test_new_prior_example_runs_and_is_what_it_says() -> None:
    definition, use = python_blocks("new-prior.md")
    namespace: dict[str, object] = {"__name__": "new_prior"}
    exec(definition, namespace)
    prior = namespace["StudentT"]()  # type: ignore[operator]
    assert len(definition.splitlines()) <= 30
    assert re.findall(r"def (\w+)", definition) == ["density", "temper", "solve"]
    phi, w = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    ours = prior.log_prob(Assignment({"w": phi}), {"weights": {"w": w}})
    student = torch.distributions.StudentT(torch.tensor(3.0).double(), w, 0.01)
    at_centre = torch.distributions.StudentT(torch.tensor(3.0).double(), phi, 0.01)
    torch.testing.assert_close(ours, (student.log_prob(phi) - at_centre.log_prob(phi)).sum())
    exec(use, namespace)
    result = namespace["result"]
    assert isinstance(result, fedprior.Result)
    assert len(result.records) == 3
    assert result.records[-1]["train_loss"] < result.records[0]["train_loss"]


def test_measured_tables_go_between_their_marks(tmp_path: Path) -> None:
    script = runpy.run_path(str(DOCS.parent / "scripts" / "fill_reproduction.py"))
    text = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    assert script["fill"](text, tmp_path) == text
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "table.md").write_text("a table\n")
    once = script["fill"](text, tmp_path)
    assert "<!-- measured: cifar10 -->\na table\n<!-- end -->" in once
    assert script["fill"](once, tmp_path) == once
    for name in ("cifar10", "cifar100", "femnist", "scaffold"):
        assert once.count(f"<!-- measured: {name} -->") == 1


def test_export_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    example, alone = python_blocks("export.md")
    exec(example, {"__name__": "export"})
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert (tmp_path / "small" / "model.py").exists()
    mine = {"my_module": torch.nn.Linear(4, 2), "my_x": torch.randn(10, 4), "my_y": torch.arange(10) % 2}
    task = fedprior.own_task(mine["my_module"], [(mine["my_x"], mine["my_y"])] * 2)
    fedprior.run(task, "fedavg", rounds=1, out="runs/mine")
    exec(alone, {"fedprior": fedprior, **mine})
    assert (tmp_path / "small-too" / "model.py").exists()


def test_every_algorithm_is_documented() -> None:
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    for name in fedprior.ALGORITHMS:
        assert f"`{name}`" in text, name


def test_examples_of_own_tasks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, in_a_file = python_blocks("tasks.md")
    namespace: dict[str, object] = {"__name__": "own"}
    exec(own, namespace)
    result = namespace["result"]
    assert isinstance(result, fedprior.Result)
    assert "global_accuracy" not in result.summary
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(in_a_file)
    with torch.random.fork_rng(devices=[]):
        task = fedprior.task("mine.py:make_task", seed=1, hidden=32)
    assert fedprior.run(task, "fedavg", rounds=1).summary["global_accuracy"] > 0
