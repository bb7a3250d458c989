"""Keys against SplitMix64 written with Python's integers, and draws against their distributions."""

import itertools
import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedprior
from fedprior.core import keys
from fedprior.core.keys import Purpose, Turn

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
int64 = st.integers(-(2**63), 2**63 - 1)
quick = settings(max_examples=40, deadline=None)


def mix(x: int) -> int:
    """SplitMix64's finaliser, from Steele, Lea and Flood (2014)."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def tensor(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int64)


def test_splitmix_gives_its_published_numbers():
    """The reference implementation's first outputs, so that the pure-Python twin is itself pinned."""
    stream = [mix((i + 1) * GAMMA) for i in range(3)]
    assert stream == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert keys.bits(tensor(0), 3).tolist() == [signed(x) for x in stream]


@quick
@given(seed=int64)
def test_the_root_key_is_one_splitmix_output_of_the_seed(seed):
    assert int(keys.key(seed)) == signed(mix(seed + GAMMA))


@quick
@given(key=int64, count=st.integers(1, 50))
def test_bits_are_the_splitmix_stream(key, count):
    assert keys.bits(tensor(key), count).tolist() == [signed(mix(key + (i + 1) * GAMMA)) for i in range(count)]


@quick
@given(key=int64, data=int64)
def test_fold_mixes_key_and_data_with_splitmix(key, data):
    assert int(keys.fold(tensor(key), data)) == signed(mix(mix(key + GAMMA) ^ mix(data + GAMMA)))


@quick
@given(key=int64, data=st.lists(int64, min_size=1, max_size=8))
def test_fold_works_element_by_element(key, data):
    folded = keys.fold(tensor(key), torch.tensor(data, dtype=torch.int64))
    assert folded.tolist() == [int(keys.fold(tensor(key), one)) for one in data]


def test_seeds_purposes_rounds_clients_and_steps_never_share_a_key():
    """Every node of the tree run → purpose → round → client → step, for small numbers, which coincide most easily."""
    small = range(6)
    found = [int(keys.key(seed)) for seed in small]
    for seed, purpose in itertools.product(small, Purpose):
        root = keys.key(seed)
        found.append(int(keys.fold(root, purpose)))
        for number in small:
            found.append(int(Turn(root, number).key(purpose)))
            for client in range(12):
                own = Turn(root, number, client).key(purpose)
                found += [int(own), *keys.fold(own, torch.arange(6)).tolist()]
    assert len(set(found)) == len(found)


def test_a_turn_of_many_is_the_turn_of_each():
    root, rounds, clients = keys.fold(keys.key(1), torch.arange(3)), torch.tensor([4, 4, 5]), torch.tensor([2, 0, 2])
    together = Turn(root, rounds, clients).key(Purpose.RELAX)
    alone = [int(Turn(root[i], int(rounds[i]), int(clients[i])).key(Purpose.RELAX)) for i in range(3)]
    assert together.tolist() == alone


@pytest.mark.parametrize(
    ("name", "settings", "again"),
    [
        ("fedsparse", {}, 0),
        ("feddrop", {"noise": True}, 0),
        ("fedmix", {}, 9 * 3 * 2),  # its clients look at their batches once before they train: the same order again
        ("scaffold", {}, 0),
    ],
)
def test_no_key_is_drawn_from_twice_in_a_run(monkeypatch, small_task, name, settings, again):
    """All draws that a run makes, of the algorithm, the batches, dropout, rounding, cohorts and attackers together."""
    drawn, original = [], keys.bits

    def recorded(key, count):
        drawn.append(int(key))
        return original(key, count)

    task = small_task(dropout=0.3, epochs=2)
    algorithm = fedprior.algorithm(name, task.network, **settings)
    monkeypatch.setattr(keys, "bits", recorded)
    fedprior.run(task, algorithm, rounds=9, wire="int8/int4", attack="constant", attackers=0.4, workers=1)
    assert len(drawn) > 300
    assert len(set(drawn)) == len(drawn) - again


def test_purposes_give_streams_that_do_not_correlate():
    streams = torch.stack([keys.uniform(keys.fold(keys.key(0), p), (20_000,), torch.float64) for p in Purpose])
    correlation = torch.corrcoef(streams) - torch.eye(len(Purpose))
    # Five standard deviations of the sample correlation of independent streams.
    assert float(correlation.abs().max()) < 5 / math.sqrt(20_000)


def test_neighbouring_keys_give_streams_that_do_not_correlate():
    """A counter is the worst key there is."""
    streams = keys.uniform(keys.fold(keys.key(0), 7), (1,), torch.float64)
    rows = torch.func.vmap(lambda k: keys.uniform(k, (2_000,), torch.float64))(keys.fold(keys.key(0), torch.arange(50)))
    assert torch.equal(rows[7, :1], streams)
    correlation = torch.corrcoef(rows) - torch.eye(50)
    assert float(correlation.abs().max()) < 5 / math.sqrt(2_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_draws_have_the_uniform_distribution(dtype):
    count = 400_000
    u = keys.uniform(keys.key(3), (count,), dtype)
    assert u.dtype == dtype
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    u = u.double()
    assert abs(float(u.mean()) - 1 / 2) < 5 * math.sqrt(1 / 12 / count)
    assert abs(float(u.var()) - 1 / 12) < 5 * math.sqrt(1 / 180 / count)
    # Kolmogorov–Smirnov: P(√n D > 2.5) is below 1e-5.
    empirical = torch.arange(1, count + 1, dtype=torch.float64) / count
    assert float((u.sort().values - empirical).abs().max()) * math.sqrt(count) < 2.5
    lag = torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1]
    assert abs(float(lag)) < 5 / math.sqrt(count)


@quick
@given(key=int64)
def test_uniform_is_strictly_between_zero_and_one(key):
    u = keys.uniform(tensor(key), (64,))
    assert bool((u.log().isfinite() & (-u).log1p().isfinite()).all())


@pytest.mark.parametrize(("extreme", "expected"), [(0, 2.0**-24), (-1, 1 - 2.0**-24)])
def test_uniform_of_the_extreme_bits_is_not_rounded_to_the_border(monkeypatch, extreme, expected):
    monkeypatch.setattr(keys, "bits", lambda key, count: torch.full((count,), extreme, dtype=torch.int64))
    assert float(keys.uniform(keys.key(0), (1,), torch.float32)) == expected


def test_uniform_takes_any_shape_and_does_not_depend_on_it():
    k = keys.key(5)
    flat = keys.uniform(k, (24,))
    assert torch.equal(keys.uniform(k, (2, 3, 4)).flatten(), flat)
    assert torch.equal(keys.uniform(k, (5,)), flat[:5])
    assert torch.equal(keys.uniform(k, ()), flat[0])


@quick
@given(key=int64, size=st.integers(1, 40), spare=st.integers(0, 40))
def test_a_permutation_is_valid_and_independent_of_padding(key, size, spare):
    alone = keys.permutation(tensor(key), size, size)
    padded = keys.permutation(tensor(key), torch.tensor(size), size + spare)
    assert sorted(alone.tolist()) == list(range(size))
    assert padded[:size].tolist() == alone.tolist()
    assert sorted(padded.tolist()) == list(range(size + spare))


def test_every_permutation_is_equally_likely():
    draws = 6_000
    orders = torch.func.vmap(lambda k: keys.permutation(k, 3, 3))(keys.fold(keys.key(1), torch.arange(draws)))
    counts = [int((orders == torch.tensor(p)).all(1).sum()) for p in itertools.permutations(range(3))]
    chi = sum((c - draws / 6) ** 2 / (draws / 6) for c in counts)
    assert sum(counts) == draws
    assert chi < 30  # five degrees of freedom: P(χ² > 30) is about 1.5e-5


@quick
@given(key=int64, data=st.data())
def test_choose_is_without_replacement_and_deterministic(key, data):
    population = data.draw(st.integers(1, 60))
    count = data.draw(st.integers(1, population))
    chosen = keys.choose(tensor(key), population, count)
    assert len(chosen) == len(set(chosen)) == count
    assert set(chosen) <= set(range(population))
    assert chosen == keys.choose(tensor(key), population, count)


def test_choose_all_of_a_population_is_a_permutation():
    assert sorted(keys.choose(keys.key(4), 25, 25)) == list(range(25))


def test_choose_takes_every_ordered_pair_equally_often():
    draws = 6_000
    pairs = [tuple(keys.choose(k, 4, 2)) for k in keys.fold(keys.key(2), torch.arange(draws))]
    expected = draws / 12
    chi = sum((pairs.count(p) - expected) ** 2 / expected for p in itertools.permutations(range(4), 2))
    assert chi < 40  # eleven degrees of freedom: P(χ² > 40) is below 1e-4


def test_choose_from_a_billion_does_not_list_them():
    start = time.process_time()
    chosen = keys.choose(keys.key(6), 10**9, 1_000)
    assert time.process_time() - start < 5  # CPU seconds, too few to list a billion
    assert len(set(chosen)) == 1_000
    assert 0 <= min(chosen) < 10**7
    assert 10**9 - 10**7 < max(chosen) < 10**9


def test_draws_are_the_same_under_vmap_as_one_by_one():
    rows = keys.fold(keys.key(7), torch.arange(6))
    sizes = torch.tensor([3, 9, 1, 7, 9, 2])
    lifted = torch.func.vmap(lambda k: keys.uniform(k, (2, 5)))(rows)
    orders = torch.func.vmap(lambda k, size: keys.permutation(k, size, 9))(rows, sizes)
    folded = torch.func.vmap(lambda k, n: keys.fold(k, n))(rows, sizes)
    for i in range(6):
        assert torch.equal(lifted[i], keys.uniform(rows[i], (2, 5)))
        assert orders[i, : sizes[i]].tolist() == keys.permutation(rows[i], int(sizes[i]), int(sizes[i])).tolist()
        assert int(folded[i]) == int(keys.fold(rows[i], int(sizes[i])))


def test_draws_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    keys.uniform(keys.key(0), (100,))
    keys.choose(keys.key(0), 100, 10)
    keys.permutation(keys.key(0), 10, 10)
    assert torch.equal(torch.get_rng_state(), before)
