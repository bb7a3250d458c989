"""A text is continued as a naive twin would, from a run and from an export."""

import sys

import pytest
import torch
from torch import nn

import fedprior
from fedprior import DataError, ModelError, SettingError, cli
from fedprior.trained.continuation import _chosen, continue_text

SMALL = {"width": 8, "layers": 1, "heads": 2, "context": 12, "least": 14000}
QUICK = {"rounds": 1, "clients_per_round": 2, "local_steps": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "run"
    task = fedprior.task("shakespeare-mini", **SMALL)
    algorithm = fedprior.algorithm("fedavg", task.network, local_optimiser="Adam(lr=0.1)")
    return fedprior.run(task, algorithm, **QUICK, out=folder)


@pytest.mark.parametrize("text", ["To", "To be, or not to be, that is"])
def test_the_likeliest_characters_are_those_of_a_naive_twin(run, text, tmp_path):
    characters, expected = run.scale.characters, text
    for _ in range(8):
        seen = torch.tensor([[characters.index(c) for c in expected[-12:]]])
        with torch.no_grad():
            expected += characters[int(run.model(seen)[0, -1].argmax())]
    assert continue_text(run.path, text, characters=8, temperature=0) == expected
    fedprior.export(run, tmp_path / "small", onnx=False)
    assert continue_text(tmp_path / "small", text, characters=8, temperature=0) == expected


def test_draws_follow_the_odds_and_the_seed(run):
    said = [continue_text(run.path, "Ay, ", characters=12, seed=seed) for seed in (0, 0, 1)]
    assert said[0] == said[1] != said[2]
    assert all(len(one) == 16 and one.startswith("Ay, ") for one in said)
    odds, draw = torch.tensor([0.1, 0.6, 0.3]).log().double(), torch.Generator().manual_seed(0)
    for temperature, power in ((1.0, 1.0), (0.5, 2.0), (2.0, 0.5)):
        drawn = torch.bincount(torch.tensor([_chosen(odds, temperature, draw) for _ in range(4000)]), minlength=3)
        wanted = odds.exp() ** power
        torch.testing.assert_close(drawn / 4000, (wanted / wanted.sum()).float(), atol=0.03, rtol=0)


def test_a_client_goes_on_in_its_own_words(run):
    own = continue_text(run.path, "My lord", characters=40, temperature=1.0, personalise=1)
    assert own.startswith("My lord")
    assert own != continue_text(run.path, "My lord", characters=40, temperature=1.0)


def test_what_cannot_be_continued_is_refused(run, tmp_path):
    with pytest.raises(DataError, match="the character 'ü'"):
        continue_text(run.path, "ü")
    with pytest.raises(SettingError, match="at least one character to continue"):
        continue_text(run.path, "")
    with pytest.raises(SettingError, match="a temperature of at least 0, got 3 and -1"):
        continue_text(run.path, "a", characters=3, temperature=-1)
    x = torch.randn(8, 3)
    task = fedprior.own_task(nn.Linear(3, 2), [(x, x.argmax(1) % 2, x, x.argmax(1) % 2)], rounds=1)
    fedprior.export(fedprior.run(task, "fedavg"), tmp_path / "small", onnx=False)
    with pytest.raises(ModelError, match="was not trained on a text of characters"):
        continue_text(tmp_path / "small", "a")
    with pytest.raises(SettingError, match="which is one network; --personalise needs a run"):
        continue_text(tmp_path / "small", "a", personalise=0)


def test_the_command(run, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedprior", "predict", str(run.path), *arguments])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        out = capsys.readouterr()
        return exited.value.code, out.out, out.err

    code, out, _ = call("--text", "[bold]To be", "--characters", "5", "--temperature", "0")
    assert code == 2  # these plays, as cut here, have no brackets
    code, out, _ = call("--text", "To be", "--characters", "5", "--temperature", "0")
    assert (code, out) == (0, continue_text(run.path, "To be", characters=5, temperature=0) + "\n")
    assert "or --text with a text to continue" in call()[2]
    assert "leave out inputs" in call("x.npy", "--text", "a")[2]
    assert "need --text" in call("x.npy", "--seed", "3")[2]
