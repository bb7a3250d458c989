"""Wrong uses of the Python API, as people try them: one line, the package's own error, at once."""

import numpy as np
import pytest
import torch
from torch import nn

import fedprior
from fedprior import FedpriorError

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1] * 4)
CLIENT = (X, Y, X, Y)


def net(hidden=8):
    return nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def task(model=None, clients=None, **settings):
    return fedprior.own_task(
        net() if model is None else model, [CLIENT] * 3 if clients is None else clients, **settings
    )


def of_another(name, model):
    return fedprior.run(task(model), fedprior.algorithm(name, task().network))


def own_algorithm():
    return fedprior.Algorithm(fedprior.priors.gaussian.Gaussian(), {"weights": fedprior.Optimiser("SGD", {"lr": 0.1})})


class TwoOutputs(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class Fails(nn.Linear):
    def forward(self, x):
        raise KeyError("my own mistake")


USES = {
    "a class for a model": (lambda: task(nn.Linear), "the class Linear, not a torch.nn.Module"),
    "a function for a model": (lambda: task(lambda x: x), "a function, not a torch.nn.Module"),
    "a state for a model": (lambda: task(net().state_dict()), "OrderedDict, not a torch.nn.Module"),
    "a lazy model": (lambda: task(nn.LazyLinear(2)), "has no shape yet"),
    "nothing to train": (lambda: task(nn.Identity()), "no trainable parameters"),
    "a model of two outputs": (lambda: task(TwoOutputs(3, 2)), "gives a tuple, not a tensor"),
    "a model that fails": (lambda: task(Fails(3, 2)), "do not run on inputs of shape.*my own mistake"),
    "one logit for labels": (lambda: task(nn.Linear(3, 1)), "at least two logits"),
    "a dictionary of clients": (lambda: task(clients={"a": CLIENT}), "dictionary.*list"),
    "a tensor of clients": (lambda: task(clients=X), "the clients are a Tensor"),
    "one client alone": (lambda: task(clients=CLIENT), "client 0 is not a tuple of tensors"),
    "no clients": (lambda: task(clients=[]), "there are no clients"),
    "no number of clients": (lambda: task(clients=7), "the clients are an int"),
    "three tensors": (lambda: task(clients=[(X, Y, X)]), "client 0 is not a tuple of tensors"),
    "NumPy": (lambda: task(clients=[(X.numpy(), Y.numpy())]), "torch.from_numpy"),
    "lists": (lambda: task(clients=[(X.tolist(), Y.tolist())]), "client 0 is not a tuple of tensors"),
    "a data loader": (lambda: task(clients=[torch.utils.data.TensorDataset(X, Y)]), "client 0 is not a tuple"),
    "labels as real numbers": (lambda: task(clients=[(X, Y.float())]), "targets are real numbers"),
    "labels in a column": (lambda: task(clients=[(X, Y[:, None])]), "give one label per example"),
    "one hot": (lambda: task(clients=[(X, nn.functional.one_hot(Y))]), "give one label per example"),
    "labels from 1": (lambda: task(clients=[(X, Y + 1)]), "the training label 2, but labels must lie between 0 and 1"),
    "negative labels": (lambda: task(clients=[(X, Y - 1)]), "the training label -1, but labels count from 0$"),
    "an empty client": (lambda: task(clients=[CLIENT, (X[:0], Y[:0])]), "client 1 has no training examples"),
    "fewer labels": (lambda: task(clients=[(X, Y[:5])]), "8 training inputs but 5 training targets"),
    "other shapes": (lambda: task(clients=[CLIENT, (X[:, :2], Y)]), r"client 1 has training inputs of shape \(2,\)"),
    "not finite": (lambda: task(clients=[(X / 0, Y)]), "not finite"),
    "whole numbers for inputs": (lambda: task(clients=[(X.long(), Y)]), "do not run on inputs of shape.*int64"),
    "a mean for a loss": (lambda: task(loss=nn.CrossEntropyLoss()), "one number per example"),
    "a class for a loss": (lambda: task(loss=nn.MSELoss), "do not run"),
    "an unknown setting": (lambda: task(round=5), "unknown setting of a run 'round'; did you mean 'rounds'"),
    "a setting of an algorithm": (lambda: task(lambda0=1e-5), "unknown setting of a run 'lambda0'"),
    "a setting of an algorithm for a run": (
        lambda: fedprior.run(task(), "fedsparse", lambda0=1e-5),
        r"fedprior.algorithm\('fedsparse', task.network, lambda0=…\)",
    ),
    "a setting that the algorithm shares with others": (
        lambda: fedprior.run(task(), "fedprox", precision=0.2),
        r"run\(task, fedprior.algorithm\('fedprox', task.network, precision=…\)\)",
    ),
    "a setting of one's own algorithm": (
        lambda: fedprior.run(task(), own_algorithm(), scale=0.1),
        "^unknown setting of a run 'scale'; an algorithm of your own takes its settings where you make it$",
    ),
    "a prior for an algorithm": (
        lambda: fedprior.run("mnist-mini", own_algorithm().prior, scale=0.1),
        "^the algorithm is a Gaussian; give its name, or one made by fedprior.algorithm",
    ),
    "draws of one network": (
        lambda: fedprior.posterior(fedprior.run(task(rounds=1, clients_per_round=2), "fedsparse-sized")),
        "^fedsparse-sized draws the same network each time",
    ),
    "draws of one network by one's own": (
        lambda: fedprior.posterior(fedprior.run(task(rounds=1, clients_per_round=2), own_algorithm())),
        "^Gaussian draws the same network each time",
    ),
    "a number for a callback": (lambda: fedprior.run(task(), progress=3), "progress is an int; give a function"),
    "a wrong value": (lambda: task(rounds="many"), "rounds must be a whole number"),
    "adapters for nothing": (lambda: fedprior.adapt(net(), targets=[]), "targets is empty"),
    "a name for a posterior": (
        lambda: fedprior.evaluate(fedprior.run(task(rounds=1, clients_per_round=2)), posterior="foo"),
        "posterior is a str; give what fedprior.posterior returns",
    ),
    "no rounds": (lambda: task(rounds=0), "rounds must be at least 1"),
    "too large a cohort": (lambda: fedprior.run(task(), "fedavg", clients_per_round=9), "there are only 3 clients"),
    "a model for a task": (lambda: fedprior.run(net(), "fedavg"), "the task is a Sequential"),
    "a class for an algorithm": (lambda: fedprior.run(task(), fedprior.Prior), "the algorithm is the class Prior"),
    "a module for a network": (
        lambda: fedprior.algorithm("fedavg", net()),
        "built for a Network, such as task.network",
    ),
    "another network, wider": (lambda: of_another("fedsparse", net(12)), "built for another network"),
    "another network, flat": (lambda: of_another("feddrop", nn.Linear(3, 2)), "built for another network"),
    "another network, deeper": (
        lambda: of_another("fedl1", nn.Sequential(nn.Linear(3, 8), nn.ReLU(), net(8)[2], nn.ReLU(), nn.Linear(2, 2))),
        "built for another network",
    ),
    "an array of NumPy for clients": (lambda: task(clients=np.zeros((3, 2))), "the clients are a ndarray"),
}


@pytest.mark.parametrize("use", USES)
def test_a_wrong_use_is_a_one_line_error(use):
    call, message = USES[use]
    with pytest.raises(FedpriorError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_generator_of_clients_is_taken():
    assert task(clients=(CLIENT for _ in range(3))).data.clients == 3


@pytest.mark.parametrize("training", [True, False])
def test_neither_a_task_nor_a_run_changes_the_module(training):
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2)).train(training)
    model[1].train(not training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mine = task(model, rounds=1, clients_per_round=2)
    for name in ("fedavg", "fedsparse"):
        result = fedprior.run(mine, name)
        fedprior.evaluate(result)
    mine.network.predict(mine.network.params(), X)
    mine.network.training_losses(mine.network.params(), X, Y, fedprior.core.keys.key(0))
    assert [part.training for part in model] == [training, not training, training, training]
    assert model.training == training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_result_is_a_short_table_in_text_and_html():
    result = fedprior.run(task(rounds=2, clients_per_round=2), "fedavg")
    text, page = repr(result), result._repr_html_()
    assert len(text.splitlines()) == 3
    assert "fedavg on own, 2 rounds" in text
    assert f"{100 * result.summary['global_accuracy']:.1f}%" in text
    assert page.count("<tr>") == 2
    assert page.count("<td>") == page.count("<th>") > 5
    assert len(page) < 2000


def test_tasks_and_algorithms_print_as_one_line():
    mine = task()
    data = "FederatedData(3 clients, 24 training and 24 test examples, 2 classes)"
    assert repr(mine) == f"Task('own', Network(Sequential, 50 parameters), {data})"
    steps = "SGD(lr=0.05) at the clients, closed form at the server"
    assert repr(fedprior.algorithm("fedavg", mine.network)) == f"Algorithm('fedavg', Gaussian, {steps})"


# ---------------------------------------------------------------------- own algorithms


class Shrunk(fedprior.priors.gaussian.Gaussian):
    """A user's own prior: only its name is."""


def own(scale=1.0, rate=0.05):
    return fedprior.Algorithm(Shrunk(scale), local={"weights": fedprior.Optimiser("SGD", {"lr": rate})})


def test_an_own_algorithms_settings_are_recorded_and_compared(tmp_path):
    mine, folder = task(rounds=2, clients_per_round=2), tmp_path / "run"
    fedprior.run(mine, own(), out=folder)
    text = (folder / "config.toml").read_text()
    for line in ('prior = "Shrunk"', "prior_precision = 1.0", 'local_optimiser_weights = "SGD(lr=0.05)"'):
        assert line in text
    (folder / "config.toml").write_text(text.replace("rounds = 2", "rounds = 3"))
    for other, said in (
        (own(scale=2.0), "prior_precision = 1.0, not 2.0"),
        (own(rate=0.1), r"SGD\(lr=0.05\), not SGD"),
    ):
        with pytest.raises(fedprior.RunError, match=said):
            fedprior.resume(folder, task=mine, algorithm=other)
    with pytest.raises(fedprior.RunError, match="trained with own, not with fedavg"):
        fedprior.resume(folder, task=mine, algorithm=fedprior.algorithm("fedavg", mine.network))
    assert len(fedprior.resume(folder, task=mine, algorithm=own()).records) == 3
