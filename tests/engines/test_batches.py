"""Which examples a client sees, checked against counting them."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprior import FederatedData
from fedprior.core import keys
from fedprior.engines.batches import ClientBatches, CohortBatches, Extent, Places, Workload

sizes_of_clients = st.lists(st.integers(1, 13), min_size=1, max_size=4)
quick = settings(max_examples=40, deadline=None)


def numbered(sizes: list[int]) -> FederatedData:
    """An example's input is its own number, so that it can be recognised; its target is its client."""
    numbers = torch.arange(sum(sizes), dtype=torch.float32).split(sizes)
    clients = [(x, torch.full((len(x),), s)) for s, x in enumerate(numbers)]
    return FederatedData.from_clients(clients, min_examples=1)


@quick
@given(sizes_of_clients, st.integers(1, 15), st.integers(1, 3), st.integers(0, 2**32))
def test_every_epoch_visits_every_example_of_the_client_once(sizes, width, epochs, seed):
    data = numbered(sizes)
    for client, size in enumerate(sizes):
        batches = ClientBatches(data, client, Workload(width, epochs), keys.key(seed))
        per_epoch = (size + width - 1) // width
        assert len(batches) == epochs * per_epoch
        for epoch in range(epochs):
            passes = [batches[step] for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
            assert all(len(b.x) == width for b in passes[:-1])
            seen = Counter(torch.cat([b.x for b in passes]).tolist())
            assert seen == Counter(range(sum(sizes[:client]), sum(sizes[: client + 1])))
            assert all((b.y == client).all() for b in passes)


def test_epochs_clients_and_seeds_have_different_orders():
    data = numbered([40, 40])
    orders = [
        tuple(b.x.int().tolist()[0] % 40 for b in ClientBatches(data, client, Workload(1, 2), keys.fold(key, client)))
        for client in (0, 1)
        for key in (keys.key(0), keys.key(1))
    ]
    halves = [half for order in orders for half in (order[:40], order[40:])]
    assert len(set(halves)) == len(halves)


@quick
@given(sizes_of_clients, st.integers(1, 7), st.integers(1, 20), st.integers(0, 2**32))
def test_local_steps_cycle_through_the_client_again_and_again(sizes, width, steps, seed):
    data = numbered(sizes)
    for client, size in enumerate(sizes):
        batches = ClientBatches(data, client, Workload(width, steps=steps), keys.key(seed))
        assert len(batches) == steps
        drawn = torch.cat([b.x for b in batches]).tolist()
        for start in range(0, len(drawn), size):
            part = drawn[start : start + size]
            assert len(set(part)) == len(part), "an example came twice before the others had their turn"


def cohort_batches(data, clients, workload, key):
    sizes = [data.train.size(client) for client in clients]
    starts = torch.tensor([int(data.train.offsets[client]) for client in clients])
    places = Places(data.train.rows, starts, torch.tensor(sizes))
    return CohortBatches(data.x, data.y, places, workload, Extent.of(sizes, workload), key)


@quick
@given(sizes_of_clients, st.integers(1, 7), st.integers(1, 3), st.none() | st.integers(1, 9), st.integers(0, 2**32))
def test_padding_does_not_change_a_clients_batches(sizes, width, epochs, steps, seed):
    data, workload = numbered(sizes), Workload(width, epochs, steps)
    clients = list(reversed(range(len(sizes))))
    client_keys = keys.fold(keys.key(seed), torch.tensor(clients))
    together = cohort_batches(data, clients, workload, client_keys)
    alone = [ClientBatches(data, client, workload, client_keys[i]) for i, client in enumerate(clients)]
    assert len(together) == max(len(batches) for batches in alone)
    for step in range(len(together)):
        batch = together[step]
        for i, batches in enumerate(alone):
            active = batch.active is None or bool(batch.active[i])
            assert active == (step < len(batches))
            if active:
                real = torch.ones(width, dtype=torch.bool) if batch.weight is None else batch.weight[i] == 1
                assert torch.equal(batch.x[i][real], batches[step].x)
                assert torch.equal(batch.y[i][real], batches[step].y)
                assert batch.weight is None or set(batch.weight[i].tolist()) <= {0.0, 1.0}


def test_a_cohort_has_no_batch_beyond_its_last():
    batches = cohort_batches(numbered([3, 5]), [0, 1], Workload(2), keys.fold(keys.key(0), torch.arange(2)))
    assert [len(batch.x) for batch in batches] == [2, 2, 2]
