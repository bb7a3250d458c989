"""docs/architecture.md draws the way from the command to the loss of one client: here it is walked."""

import re
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedprior.cli import main

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "fedprior"
AT_MOST = 8
"""Files on the way: lower this when the way gets shorter, never raise it."""
TASK = """
import sys

import torch
from torch import nn

import fedprior


def loss(outputs, targets):
    sys.modules["walk"].visit()
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def make_task():
    clients = [(torch.randn(6, 3), torch.arange(6) % 2, torch.randn(2, 3), torch.arange(2)) for _ in range(3)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return fedprior.own_task(model, clients, loss=loss, rounds=1, clients_per_round=2, batch_size=3)
"""


def walk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """File and function of every call of ours on the stack, from the command to the first loss of a client."""
    stacks: list[list[tuple[str, str]]] = []

    def visit() -> None:
        frames = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()]
        stacks.append([(path.relative_to(SRC).as_posix(), name) for path, name in frames if path.is_relative_to(SRC)])

    monkeypatch.setitem(sys.modules, "walk", SimpleNamespace(visit=visit))
    monkeypatch.chdir(folder)
    (folder / "mine.py").write_text(TASK, encoding="utf-8")
    # One worker: with several, a client's turn is in a thread, and the stack begins there.
    command = ["fedprior", "run", "mine.py:make_task", "--algorithm", "fedsparse", "--set", "workers=1", "--out", "run"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    # Building a task and evaluating a model look at a loss as well.
    return next(stack for stack in stacks if any(path == "em/estep.py" for path, _ in stack))


def test_the_path_from_the_command_to_a_loss_is_as_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = walk(tmp_path, monkeypatch)
    files = list(dict.fromkeys(path for path, _ in calls))
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = re.findall(r"└─ ([\w/]+\.py) +(\w+)", text)
    assert [path for path, _ in drawn] == files
    for step in drawn:
        assert step in calls
    assert len(files) <= AT_MOST
    names = {6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten", 11: "eleven"}
    assert f"passes through {names[len(files)]} files" in text
