"""Clients' data in one array: found again, and refused where it cannot be trained on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedprior
from fedprior import DataError, FederatedData, ModelError
from fedprior.core.federated import Shards


def client(size, label=0, test=0):
    x, y = torch.randn(size + test, 3), torch.full((size + test,), label)
    return (x[:size], y[:size], x[size:], y[size:]) if test else (x, y)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=6))
def test_every_client_finds_its_own_examples(sizes):
    clients = [client(size, i, test) for i, (size, test) in enumerate(sizes)]
    data = FederatedData.from_clients(clients, min_examples=1)
    assert data.clients == len(clients)
    assert data.classes == len(clients)
    for i, mine in enumerate(clients):
        assert torch.equal(data.x[data.train[i]], mine[0])
        assert torch.equal(data.y[data.train[i]], mine[1])
        assert data.train.size(i) == len(mine[0])
        if len(mine) == 4:
            assert torch.equal(data.test_x[data.test[i]], mine[2])
            assert torch.equal(data.test_y[data.test[i]], mine[3])
        else:
            assert data.test.size(i) == len(data.test[i]) == 0
    assert len(data.test.rows) == len(data.test_y) == sum(test for _, test in sizes)


def test_shards_give_each_client_its_rows():
    shards = Shards.of([[4, 2], [], [9]])
    assert [shards[i].tolist() for i in range(len(shards))] == [[4, 2], [], [9]]
    assert [shards.size(i) for i in range(len(shards))] == [2, 0, 1]


def test_labels_of_any_whole_type_can_be_trained_on():
    for dtype in (torch.uint8, torch.int32, torch.int64):
        task = fedprior.own_task(torch.nn.Linear(3, 2), [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1], dtype=dtype))])
        assert fedprior.run(task, "fedavg", rounds=1).summary["rounds"] == 1


# ---------------------------------------------------------------------- what cannot be trained on


def refused(clients, match, **options):
    with pytest.raises(DataError, match=match) as caught:
        FederatedData.from_clients(clients, **options)
    assert "\n" not in str(caught.value)


def test_zero_clients_are_refused():
    refused([], "no clients")


@pytest.mark.parametrize("empty", [client(0), (torch.zeros(0), torch.zeros(0, dtype=torch.long)), client(0, test=3)])
def test_an_empty_client_is_refused_by_its_number(empty):
    refused([client(3), client(3), empty, client(3)], "client 2 has no training examples")
    refused([empty, client(3)], "client 0 has no training examples")


def test_a_client_with_one_example_is_refused_unless_allowed():
    refused([client(3), client(1)], "client 1 has only 1 training example; .*min_examples=1")
    data = FederatedData.from_clients([client(3), client(1)], min_examples=1)
    assert data.train.size(1) == 1
    task = fedprior.own_task(torch.nn.Linear(3, 2), [client(3), client(1)], min_examples=1)
    assert fedprior.run(task, "fedavg", rounds=2, clients_per_round=2, mode="vectorised").summary["rounds"] == 2


@pytest.mark.parametrize(("label", "what"), [(5, "training"), (-1, "training"), (5, "test"), (-1, "test")])
def test_a_label_out_of_range_names_the_client(label, what):
    bad = client(3, 1, test=2)
    bad[1 if what == "training" else 3][1] = label
    refused(
        [client(2), client(2), bad],
        f"client 2 has the {what} label {label}, but labels must lie between 0 and 4",
        classes=5,
    )


def test_a_label_beyond_the_models_outputs_names_the_client():
    clients = [client(3, 0), client(3, 1), client(3, 7)]
    with pytest.raises(DataError, match="client 2 has the training label 7, but labels must lie between 0 and 4"):
        fedprior.own_task(torch.nn.Linear(3, 5), clients)
    assert fedprior.own_task(torch.nn.Linear(3, 8), clients).data.classes == 8


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_not_finite_name_the_client(value):
    for part, what in ((0, "training inputs"), (2, "test inputs")):
        bad = client(3, test=2)
        bad[part][1, 2] = value
        refused([client(2, test=1), bad], f"client 1 has {what} that are not finite")


def test_targets_that_are_not_finite_name_the_client():
    refused([(torch.ones(2, 1), torch.ones(2)), (torch.ones(2, 1), torch.tensor([1, torch.nan]))], "client 1 .*targets")


def test_lengths_that_differ_name_the_client_even_where_the_totals_agree():
    x, y = torch.randn(7, 3), torch.zeros(7, dtype=torch.long)
    refused([(x[:3], y[:3]), (x[:4], y[:3])], "client 1 has 4 training inputs but 3 training targets")
    refused([(x[:3], y[:4]), (x[:4], y[:3])], "client 0 has 3 training inputs but 4 training targets")
    refused([(x[:3], y[:3], x[:2], y[:1])], "client 0 has 2 test inputs but 1 test targets")


def test_clients_whose_examples_have_other_shapes_or_types_are_named():
    y = torch.zeros(2, dtype=torch.long)
    refused([client(2), (torch.ones(2, 4), y)], r"client 1 has training inputs of shape \(4,\)")
    refused([client(2), (torch.ones(2, 3).double(), y)], "client 1 has training inputs .*float64")
    refused([client(2), (torch.ones(2, 3), y.float())], "client 1 has training targets .*float32")
    refused([client(2), (*client(2), torch.ones(2, 5), y)], r"client 1 has test inputs of shape \(5,\)")


@pytest.mark.parametrize(
    "odd", [(torch.ones(2, 3),), (torch.ones(2, 3), [0, 1]), (torch.ones(2, 3), torch.tensor(1)), (*client(2), None)]
)
def test_a_client_that_is_not_tensors_is_named(odd):
    refused([client(2), odd], r"client 1 is not a tuple of tensors \(x, y\)")


def test_a_model_that_does_not_run_on_the_data_is_refused():
    with pytest.raises(ModelError, match=r"do not run on inputs of shape \(3,\)"):
        fedprior.own_task(torch.nn.Linear(4, 2), [client(3)])
    with pytest.raises(ModelError, match=r"output for one example has shape \(2,\), not \(3,\)"):
        fedprior.own_task(torch.nn.Linear(3, 2), [client(3)], classes=3)
    with pytest.raises(DataError, match="targets are real numbers"):
        fedprior.own_task(torch.nn.Linear(3, 2), [(torch.ones(2, 3), torch.ones(2))])


def test_real_targets_train_with_an_own_loss():
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    task = fedprior.own_task(
        torch.nn.Linear(3, 1), [(x[:6], y[:6]), (x[6:], y[6:])], loss=lambda out, y: (out[:, 0] - y) ** 2, batch_size=3
    )
    result = fedprior.run(task, fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.1)"), rounds=40)
    assert (result.model.weight[0] - torch.tensor([1.0, -2.0, 0.5])).abs().max() < 0.05


def test_a_batch_norm_that_stores_nothing_is_refused_with_a_remedy():
    norm = torch.nn.BatchNorm1d(3, track_running_stats=False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), norm, torch.nn.Linear(3, 2))
    with pytest.raises(ModelError, match=r"'1' is a BatchNorm1d that stores no statistics.*track_running_stats=True"):
        fedprior.own_task(model, [client(3)])


def test_a_loss_must_give_one_number_per_example():
    """A mean over the batch would count padding."""
    with pytest.raises(ModelError, match="one number per example"):
        fedprior.own_task(torch.nn.Linear(3, 2), [client(3)], loss=torch.nn.functional.cross_entropy)


def test_targets_of_another_shape_need_an_own_loss_and_have_no_accuracy():
    x = torch.randn(6, 3)
    with pytest.raises(DataError, match="give one label per example"):
        fedprior.own_task(torch.nn.Linear(3, 2), [(x, torch.zeros(6, 1, dtype=torch.int64))])
    task = fedprior.own_task(
        torch.nn.Linear(3, 1), [(x, x[:, :1], x, x[:, :1])] * 2, loss=lambda out, y: ((out - y) ** 2).mean(1)
    )
    for mode in ("vectorised", "in-turn"):
        summary = fedprior.run(task, "fedavg", rounds=1, mode=mode).summary
        assert not {"global_accuracy", "local_accuracy"} & summary.keys()
        assert summary["global_loss"] > 0
        assert summary["local_loss"] > 0


class Noisy(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn_like(x[:, :2])


class Counting(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (Noisy(3, 2), "its own random numbers"),
        (Counting(), "changes its buffer 'calls'"),
        (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.AlphaDropout()), "AlphaDropout"),
        (torch.nn.Linear(3, 2).half(), "all be float32, or all float64"),
        (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).double()), "all be float32, or all float64"),
    ],
    ids=["noise", "buffer", "alpha dropout", "half", "mixed"],
)
def test_models_that_are_not_functions_of_parameters_inputs_and_key_are_refused(model, match):
    with pytest.raises(ModelError, match=match):
        fedprior.own_task(model, [client(3)])
