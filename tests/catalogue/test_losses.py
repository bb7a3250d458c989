"""Losses and targets of one's own, and several inputs: in both engines as in a naive twin, and on devices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedprior
from fedprior import DataError, ModelError, SettingError
from fedprior.core.inputs import Several

MODES = ("in-turn", "vectorised")
SIZES = (5, 8, 3)


def seeded(build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double()


def draws():
    return torch.Generator().manual_seed(4)


class Bag(nn.Module):
    """The mean embedding of the words that a mask keeps, beside some numbers: `forward` has three inputs."""

    def __init__(self, outputs=3):
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(9, 4), nn.Linear(6, 7), nn.Linear(7, outputs)

    def forward(self, words, mask, numbers):
        kept = mask.unsqueeze(-1).to(numbers.dtype)
        mean = (self.embed(words) * kept).sum(1) / kept.sum(1).clamp(min=1)
        return self.out(torch.relu(self.hidden(torch.cat([mean, numbers], 1))))


class Packed(nn.Module):
    """The same network, which reads everything from one tensor."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x[:, :5].long(), x[:, 5:10] > 0, x[:, 10:])


class Tagger(nn.Module):
    """Scores of four tags for every word."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 5), nn.Linear(5, 4)

    def forward(self, words):
        return self.out(torch.tanh(self.embed(words)))


def sentences(count, draw):
    lengths = torch.randint(1, 6, (count, 1), generator=draw)
    return torch.randint(9, (count, 5), generator=draw), torch.arange(5) < lengths


def bags(draw, count):
    words, mask = sentences(count, draw)
    numbers = torch.randn(count, 2, generator=draw, dtype=torch.float64)
    return {"words": words, "mask": mask, "numbers": numbers}


def several(targets):
    def clients(draw):
        def part(count):
            x = bags(draw, count)
            return x, targets(x, draw)

        return [(*part(size), *part(size + 1)) for size in SIZES]

    return clients


def tags(draw):
    """Padded sequences: a place that is no word has no tag."""

    def part(count):
        words, mask = sentences(count, draw)
        return words, torch.where(mask, words % 4, -100)

    return [(*part(size), *part(size + 1)) for size in SIZES]


def rows(draw):
    def part(count):
        x = torch.randn(count, 3, generator=draw, dtype=torch.float64)
        return x, x.cumsum(1)[:, 1:]

    return [(*part(size), *part(size + 1)) for size in SIZES]


def labels(x, draw):
    return (x["words"][:, :1] == torch.arange(3)).double()


def one_class(x, draw):
    return x["words"][:, 0] % 3


def per_word(outputs, targets):
    """One number for every word; a place that has none costs nothing."""
    return F.cross_entropy(outputs.mT, targets, reduction="none", ignore_index=-100)


def right_labels(outputs, targets):
    return ((outputs > 0) == (targets > 0)).double()


TASKS = {
    # Model, clients, loss of an example (outputs and targets of one), what own_task gets.
    "multi-label of several inputs": (
        Bag,
        several(labels),
        lambda o, y: F.binary_cross_entropy_with_logits(o, y),
        {"loss": nn.BCEWithLogitsLoss(reduction="none"), "metrics": {"hits": right_labels}},
    ),
    "classes of several inputs": (Bag, several(one_class), lambda o, y: -o.log_softmax(-1)[y], {}),
    "padded sequences": (
        Tagger,
        tags,
        lambda o, y: -o.log_softmax(-1)[torch.arange(5), y.clamp(min=0)][y != -100].mean(),
        {},
    ),
    "a loss for every token": (
        Tagger,
        tags,
        lambda o, y: -o.log_softmax(-1)[torch.arange(5), y.clamp(min=0)][y != -100].sum() / 5,
        {"loss": per_word},
    ),
    "regression": (
        lambda: nn.Linear(3, 2),
        rows,
        lambda o, y: (o - y).abs().sum() / 2,
        {"loss": nn.L1Loss(reduction="none")},
    ),
}


def called(model, x):
    return model(**x) if isinstance(x, dict) else model(x)


def row(x, place):
    return {name: part[place] for name, part in x.items()} if isinstance(x, dict) else x[place]


def naive(model, clients, loss, rounds, rate):
    """Federated averaging, example by example: one step of the mean gradient at every client, then their mean."""
    for _ in range(rounds):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for x, y, *_ in clients:
            each = [loss(called(model, row(x, slice(i, i + 1)))[0], y[i]) for i in range(len(y))]
            found = torch.autograd.grad(torch.stack(each).mean(), list(model.parameters()))
            for sum_, grad in zip(total, found, strict=True):
                sum_ += len(y) / sum(SIZES) * grad
        with torch.no_grad():
            for p, step in zip(model.parameters(), total, strict=True):
                p -= rate * step
    return model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TASKS)
def test_federated_averaging_is_that_of_a_naive_twin(name, mode):
    build, make, loss, given = TASKS[name]
    clients = make(draws())
    task = fedprior.own_task(seeded(build), clients, **given, batch_size=8, clients_per_round=3, rounds=3, device="cpu")
    algorithm = fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.5)")
    result = fedprior.run(task, algorithm, mode=mode)
    twin = naive(seeded(build), clients, loss, 3, 0.5)
    for found, expected in zip(result.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    everyone = [(row(x, slice(i, i + 1)), y[i]) for _, _, x, y in clients for i in range(len(y))]
    with torch.no_grad():
        truth = torch.stack([loss(called(twin, x)[0], y) for x, y in everyone]).mean()
    assert result.summary["global_loss"] == pytest.approx(float(truth), rel=1e-9)
    assert result.records[-1]["train_loss"] < result.records[0]["train_loss"]
    if "metrics" in given:
        outputs = [(called(twin, x)[0], y) for x, y in everyone]
        hits = [float(((o > 0) == (y > 0)).double().mean()) for o, y in outputs]
        assert result.summary["global_hits"] == pytest.approx(sum(hits) / len(hits))
        assert "global_accuracy" not in result.summary
    if name == "classes of several inputs":
        right = [int(called(twin, x)[0].argmax() == y) for x, y in everyone]
        assert result.summary["global_accuracy"] == pytest.approx(sum(right) / len(right))


# ---------------------------------------------------------------------- several inputs, everywhere


@pytest.fixture
def both():
    """The same task with several inputs and, packed into one tensor, with one."""
    clients = several(one_class)(draws())
    packed = [tuple(_packed(part) if isinstance(part, dict) else part for part in one) for one in clients]
    quick = {"batch_size": 3, "clients_per_round": 2, "rounds": 3, "evaluate_every": 1, "device": "cpu"}
    return (
        fedprior.own_task(seeded(Bag), clients, **quick),
        fedprior.own_task(seeded(lambda: Packed(Bag())), packed, **quick),
    )


def _packed(x):
    return torch.cat([x["words"].double(), x["mask"].double(), x["numbers"]], 1)


@pytest.mark.parametrize("data", ["device", "host"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["fedprox", "fedsparse", "fedmix", "scaffold"])
def test_several_inputs_are_one_tensor_in_pieces(both, name, mode, data):
    """Records, messages and gates are the same to the last bit; only names of parameters differ."""
    given = {"lambda0": 1e-3, "structured": mode == "in-turn"} if name == "fedsparse" else {}
    found = [fedprior.run(task, fedprior.algorithm(name, task.network, **given), mode=mode, data=data) for task in both]
    renamed = [{key.replace("inner.", ""): value for key, value in record.items()} for record in found[1].records]
    assert found[0].records == renamed
    test_x = both[0].data.test_x
    torch.testing.assert_close(
        found[0].model(**test_x.parts), found[1].model(_packed(test_x.parts)), rtol=0, atol=1e-12
    )


def test_a_run_with_several_inputs_resumes_and_is_evaluated_but_not_exported(both, tmp_path):
    task, _ = both
    whole = fedprior.run(task, "fedsparse", out=tmp_path / "run")
    scores = fedprior.evaluate(whole)
    assert scores["loss"] == pytest.approx(whole.summary["global_loss"], rel=1e-12)
    assert scores["accuracy"] == whole.summary["global_accuracy"]
    assert fedprior.evaluate(tmp_path / "run", task=task, personalise=1)["examples"] == SIZES[1] + 1
    with pytest.raises(ModelError, match=r"an export reads one tensor, and this network has several inputs: Several"):
        fedprior.export(whole, tmp_path / "small")
    longer = fedprior.resume(tmp_path / "run", task=task, rounds=4)
    assert longer.records[:3] == whole.records


def test_norms_of_several_inputs_have_statistics(both):
    class Normed(Bag):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(7)

        def forward(self, words, mask, numbers):
            kept = mask.unsqueeze(-1).to(numbers.dtype)
            mean = (self.embed(words) * kept).sum(1)
            return self.out(torch.relu(self.norm(self.hidden(torch.cat([mean, numbers], 1)))))

    clients = several(one_class)(draws())
    packed = [tuple(_packed(part) if isinstance(part, dict) else part for part in one) for one in clients]
    for mode in MODES:
        records = [
            fedprior.run(fedprior.own_task(seeded(build), given), "fedavg", rounds=2, mode=mode, device="cpu").records
            for build, given in ((Normed, clients), (lambda: Packed(Normed()), packed))
        ]
        assert records[0] == records[1]


def test_clients_are_made_from_a_dictionary():
    x = bags(draws(), 30)
    y = one_class(x, None)
    clients = fedprior.clients_from({**x, "words": x["words"].numpy()}, y, partition="iid", clients=3)
    assert all(isinstance(one[0], Several) for one in clients)
    task = fedprior.own_task(seeded(Bag), clients, rounds=1)
    assert fedprior.run(task, "fedavg").summary["global_loss"] > 0


def _changed(**changes):
    clients = several(one_class)(draws())
    clients[1] = ({**clients[1][0], **changes}, *clients[1][1:])
    return clients


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (lambda: _changed(more=torch.zeros(8)), r"client 1 has the inputs \['words', 'mask', 'numbers', 'more'\], but"),
        (lambda: _changed(mask=torch.zeros(7, 5)), "client 1 has inputs of different length"),
        (lambda: _changed(mask=torch.zeros(8, 4).bool()), r"training inputs 'mask' of shape \(4,\)"),
        (lambda: _changed(numbers=torch.full((8, 2), torch.nan).double()), "client 1 has training inputs that are not"),
        (lambda: _changed(mask=[1, 2]), "client 1 is not a tuple of tensors"),
        (lambda: [({}, torch.zeros(2).long())], "client 0 is not a tuple of tensors"),
        (
            lambda: [({"words": torch.zeros(2, 5).long()}, torch.zeros(2).long())],
            "the model and its loss do not run on",
        ),
    ],
)
def test_inputs_that_cannot_be_are_refused(clients, message):
    with pytest.raises((DataError, ModelError, SettingError), match=message) as caught:
        fedprior.own_task(seeded(Bag), clients())
    assert "\n" not in str(caught.value)
