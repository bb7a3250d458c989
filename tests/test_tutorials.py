"""Every notebook of docs/tutorials runs as it stands, and prints what is stored in it, up to its numbers."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
execute = runpy.run_path(str(ROOT / "scripts" / "run_tutorials.py"))["execute"]


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the notebook has defined at its end."""
    notebook = json.loads((TUTORIALS / f"{name}.ipynb").read_text(encoding="utf-8"))
    stored = ["".join(line for one in c["outputs"] for line in one["text"]) for c in cells(notebook)]
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    monkeypatch.chdir(folder)
    with torch.random.fork_rng(devices=[]):
        printed = execute(notebook, namespace)
    # Accuracies differ from one CPU to another; how many numbers there are, and the words around them, do not.
    assert [shape(text) for text in printed] == [shape(text) for text in stored]
    return namespace


def cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def shape(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,]*", "#", text))


def test_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("compare", tmp_path, monkeypatch)
    sent = {name: result.summary["bytes_up"] for name, result in found["results"].items()}
    assert sent["feddrop"] < sent["fedavg"] == sent["fedprox"]
    assert sent["fedsparse"] < sent["fedavg"]
    assert found["rounded"].summary["bytes_up"] < sent["fedavg"] / 8


def test_own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("own-task", tmp_path, monkeypatch)
    records = found["result"].records
    assert [record["round"] for record in records] == list(range(1, 9))
    assert records[-1]["train_loss"] < records[0]["train_loss"]
    assert (tmp_path / "runs" / "signals" / "model.safetensors").is_file()
    losses = [record["train_loss"] for record in found["fitted"].records]
    assert losses[-1] < losses[0]


def test_own_prior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("own-prior", tmp_path, monkeypatch)
    assert found["ours"].records == found["fedavg"].records
    assert torch.equal(found["pull"], -2 * found["phi"]["a"])


def test_deploy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")
    found = run("deploy", tmp_path, monkeypatch)
    summary, simulated = found["summary"], found["simulated"].summary
    assert (summary["engine"], summary["rounds"]) == ("flower", 3)
    assert (summary["bytes_up"], summary["bytes_down"]) == (simulated["bytes_up"], simulated["bytes_down"])


def test_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("small", tmp_path, monkeypatch)
    sizes = found["about"]["sizes"]
    assert sizes["compact"]["parameters"] < 0.25 * sizes["dense"]["parameters"]
    # Both compute the same sums in another order: only a tie may fall otherwise.
    assert int(found["same"]) >= 198


def test_every_notebook_has_a_test_and_is_small() -> None:
    paths = sorted(TUTORIALS.glob("*.ipynb"))
    assert [path.stem for path in paths] == ["compare", "deploy", "own-prior", "own-task", "small"]
    for path in paths:
        assert path.stat().st_size < 20_000
