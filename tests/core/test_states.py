"""States, files and metrics on a few numbers: what each small function must do, worked out by hand."""

import math
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedprior.core import files, metrics, storage, trees
from fedprior.core.errors import RunError
from fedprior.core.federated import FederatedData
from fedprior.core.keys import key
from fedprior.core.network import Network
from fedprior.core.workers import Workers
from fedprior.runs.early import best

# ---------------------------------------------------------------------- files


def saved(tree: dict, run: str = "mine") -> storage.Saved:
    return storage.Saved(run, 3, 1.5, "records", tree)


def test_a_checkpoint_belongs_to_its_kind_and_run(tmp_path) -> None:
    path = tmp_path / "file"
    storage.save(path, "kind", saved({"a": {"x": torch.ones(2), "n": 4}}))
    found = storage.load(path, "kind", "mine")
    assert (found.round, found.seconds, found.records, found.tree["a"]["n"]) == (3, 1.5, "records", 4)
    with pytest.raises(RunError, match="kind other"):
        storage.load(path, "other", "mine")
    with pytest.raises(RunError, match="does not belong to the run"):
        storage.load(path, "kind", "yours")


def test_a_checksum_covers_names_and_numbers() -> None:
    """Two tensors that change places are damage too."""
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    sums = {
        storage._checksum(tensors)
        for tensors in ({"a": one, "b": two}, {"a": two, "b": one}, {"a": one, "c": two}, {"a": one}, {})
    }
    assert len(sums) == 5
    assert storage._checksum({"b": two, "a": one}) == storage._checksum({"a": one, "b": two})


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    model = {"a": {"x": torch.zeros(2, 3)}}
    fine = {"a": {"x": torch.ones(2, 3), "more": torch.ones(5)}}
    found = storage.like(model, fine)
    assert list(found["a"]) == ["x", "more"]
    assert torch.equal(found["a"]["x"], torch.ones(2, 3))
    for wrong in (torch.ones(3, 2), torch.ones(2, 3, 1), torch.ones(2, 3).double(), torch.ones(2, 3).int()):
        with pytest.raises(ValueError):  # noqa: PT011
            storage.like(model, {"a": {"x": wrong}})


def test_a_file_is_replaced_at_once(tmp_path, monkeypatch) -> None:
    """Whoever reads while it is written sees the old file; a crash while writing leaves the old one."""
    path = tmp_path / "file"
    files.write_atomically(path, b"old")
    seen = []
    monkeypatch.setattr(os, "fsync", lambda number: seen.append(path.read_bytes()))
    before = path.stat().st_ino
    files.write_atomically(path, b"new")
    assert seen == [b"old"]
    assert path.read_bytes() == b"new"
    assert path.stat().st_ino != before, "another file under the old name"
    assert list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------------- trees


def test_rows_of_a_stack_keep_their_places() -> None:
    stack = trees.Stack(3)
    for index in (2, 0, 1):
        stack.put(index, {"a": torch.tensor([float(index)])})
    assert stack.rows["a"].tolist() == [[0], [1], [2]]
    assert trees.row(stack.rows, 2)["a"].tolist() == [2]
    assert trees.stack([{"a": torch.tensor(5)}, {"a": torch.tensor(6)}])["a"].tolist() == [5, 6]


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("small", [1, 5, 1000])
def test_few_long_tensors_are_mapped_as_many_short_ones(dims: int, small: int, monkeypatch) -> None:
    monkeypatch.setattr(trees, "SMALL", small)
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (2, 3), "b": (2, 3, 4), "c": (2, 3, 2, 3), "d": (2, 3, 5)}
    one = {"x": {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}}
    one["x"]["a"] = one["x"]["a"].double()
    two = {"x": {name: torch.randn_like(one["x"][name]) for name in reversed(shapes)}}
    flags = torch.tensor([True, False])
    chosen = flags.reshape(-1, *[1] * dims)

    def choose(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(chosen, new, old)

    found = dict(trees.leaves(trees.map_rows(choose, dims, one, two)))
    mean = dict(trees.leaves(trees.map_rows(lambda rows: rows.mean(0), dims, one)))
    for path, value in trees.leaves(one):
        other = two["x"][path.split("/")[1]]
        expected = torch.stack([value[0], other[1]])
        torch.testing.assert_close(found[path], expected, rtol=0, atol=0)
        torch.testing.assert_close(mean[path], value.mean(0))


def test_a_clone_has_memory_of_its_own() -> None:
    tree = {"a": {"x": torch.ones(2)}, "b": {"y": torch.zeros(3)}}
    copy = trees.clone(tree)
    tree["a"]["x"] += 1
    assert copy["a"]["x"].tolist() == [1, 1]
    assert copy["b"]["y"].tolist() == [0, 0, 0]


# ---------------------------------------------------------------------- metrics


class Says(nn.Module):
    """Outputs are a row of a table: what it says to input i."""

    def __init__(self, table: list[list[float]]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor(table, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x.long()[:, 0]]


def inputs(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32)[:, None]


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 512])
def test_correct_answers_and_losses_are_summed_over_batches(batch: int) -> None:
    """The table says 0, 1, 0, 1, 1; the labels are 0, 1, 1, 1, 0."""
    rows = [[2, 1], [0, 3], [1, 0], [0, 1], [0, 1]]
    network = Network(Says(rows), inputs(1)[0])
    y = torch.tensor([0, 1, 1, 1, 0])
    data = FederatedData.from_clients([(inputs(5), y)], classes=2)
    what = metrics.measures(network, data)
    assert what.names == ("loss", "accuracy")
    loss, right = metrics.sums(network, what, network.params(), inputs(5), y, batch).tolist()
    assert right == 3
    # −log softmax of the label: log(1 + e^(other − label)).
    assert loss == pytest.approx(sum(math.log1p(math.exp(d)) for d in (-1, -3, 1, -1, 1)), rel=1e-6)


def test_targets_that_are_not_classes_have_no_accuracy() -> None:
    network = Network(Says([[2, 1], [0, 3]]), inputs(1)[0], lambda outputs, y: (outputs - y).square().mean(1))
    data = FederatedData.from_clients([(inputs(2), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))])
    what = metrics.measures(network, data)
    assert what.names == ("loss",)
    assert metrics.sums(network, what, network.params(), data.x, data.y).tolist() == [
        pytest.approx((1 + 0 + 0 + 9) / 2)
    ]


def test_an_ensemble_votes_with_its_mean_probability() -> None:
    """One member is sure beyond all measure where two disagree mildly: by logits it would win, by votes it may not."""
    network = Network(Says([[0.0, 0.0]] * 3), inputs(1)[0])
    members = torch.tensor([[[100.0, 0.0]] * 3, [[0.0, 3.0]] * 3, [[0.0, 3.0]] * 3])
    x, y = inputs(3), torch.tensor([1, 1, 0])
    data = FederatedData.from_clients([(x, y, x, y)], classes=2)
    what = metrics.measures(network, data)
    found = metrics.judge(Workers(network, 1), what, {"table": members}, data, batch=2).scores
    zero = (1 + 2 / (1 + math.exp(3))) / 3  # the mean probability of class 0: 0.365
    assert found["global_accuracy"] == pytest.approx(2 / 3)
    assert found["global_loss"] == pytest.approx(-(2 * math.log(1 - zero) + math.log(zero)) / 3, rel=1e-5)


def test_local_scores_cover_only_clients_that_had_a_turn() -> None:
    scores = {"accuracy": torch.tensor([0.5, math.nan, 1.0, math.nan], dtype=torch.float64)}
    assert metrics.local_scores(scores) == {"local_accuracy": 0.75}
    assert math.isnan(metrics.local_scores({"loss": torch.tensor([math.nan])})["local_loss"])


def test_a_layers_sparsity_is_its_share_of_zeros() -> None:
    models = {"fc.weight": torch.tensor([[[1.0, 0, 0, 0], [0, 0, 0, 0]]]), "fc.bias": torch.zeros(1, 2)}
    assert metrics.layer_sparsity(models) == {"sparsity/fc": 7 / 8}
    assert metrics.layer_sparsity({"fc.weight": torch.ones(1, 2, 4)}) == {}


def test_disagreement_is_a_distance() -> None:
    found = metrics.disagreement(
        {"a": torch.tensor([0.25, 1.0]), "b": torch.tensor([0.5])},
        {
            "a": torch.tensor([0.75, 0.5]),
            "b": torch.tensor([0.5]),
        },
    )
    assert found == {"tv_mean": pytest.approx(1 / 3), "tv_max": 0.5}
    assert metrics.disagreement({}, {}) == {}


# ---------------------------------------------------------------------- dropout


class Calling(nn.Module):
    """Calls a function in training and keeps the results."""

    def __init__(self, function: Callable[[bool], Tensor], times: int) -> None:
        super().__init__()
        self.scale, self.function, self.times = nn.Parameter(torch.ones(())), function, times
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.function(self.training) for _ in range(self.times)]
        return x * self.scale


def seen_in_a_step(function: Callable[[bool], Tensor], times: int = 1) -> list[Tensor]:
    module = Calling(function, times)
    network = Network(module, torch.zeros(2))
    network.training_loss(network.params(), torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), None, key(0))
    return module.seen


def test_two_dropout_layers_have_different_draws_in_a_step() -> None:
    """Inside one network and in a layer of the same shape: alike, the second would drop what the first has dropped."""

    def drop(training: bool) -> Tensor:
        return nn.functional.dropout(torch.ones(1000), 0.5, training) > 0

    seen = seen_in_a_step(drop, 3)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        agree = float((seen[one] == seen[other]).double().mean())
        assert abs(agree - 0.5) < 5 * 0.5 / 1000**0.5
    assert all(torch.equal(a, b) for a, b in zip(seen, seen_in_a_step(drop, 3), strict=True))
    assert np.mean([float(value.double().mean()) for value in seen]) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("drop", [nn.functional.dropout, nn.functional.dropout2d])
def test_dropout_in_evaluation_mode_drops_nothing(drop: Callable[..., Tensor]) -> None:
    """As of a part of a network that is in evaluation mode."""
    (value,) = seen_in_a_step(lambda training: drop(torch.ones(2, 50, 2, 2), 0.5, False))
    assert bool((value == 1).all())


@pytest.mark.parametrize("nothing", [math.nan, math.inf, None])
def test_nan_is_never_the_best(nothing: float | None) -> None:
    """Wherever it stands: comparisons with it are all false."""
    for by, values, found in (
        ("global_accuracy", [nothing, 0.5, 0.25], 2),
        ("global_accuracy", [0.5, nothing, 0.75], 3),
        ("-global_loss", [nothing, 3.0, 2.0], 3),
    ):
        name = by.removeprefix("-")
        records = [{"round": i, "sparsity": 0.0, name: value} for i, value in enumerate(values, 1)]
        chosen = best(records, by)
        assert chosen is not None
        assert (chosen.round, chosen.since) == (found, 3 - found)
    records = [{"round": i, "sparsity": 0.0, "global_loss": value} for i, value in enumerate([3.0, 2.0, 2.0, 4.0], 1)]
    lowest = best(records, "global_loss")
    assert lowest == ("global_loss", 2, 2.0, 2), "the earliest of equals"
