"""Rounding is unbiased where it is random, near where it is not, exact where nothing has moved, and a naive twin's."""

from dataclasses import replace

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

import fedprior
from fedprior.core import keys, trees
from fedprior.units import WeightGating
from fedprior.wire import Layout, Section, Wire, quantise, restore
from small_world import small_net

ROUNDED = ["float16", "bfloat16", "int8", "int4"]
WHOLE = {"int8": 127, "int4": 7}
SHAPES = {"conv": (3, 2, 2, 2), "fc": (4, 5), "bias": (4,), "gain": ()}


def layout(precision, **section):
    return Layout({"weights": Section(SHAPES, **section)}, direction="up", precision=precision)


def draw_message(seed, scale=1.0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    return {"weights": {n: (scale * torch.randn(s, generator=draw)).to(dtype) for n, s in SHAPES.items()}}


def rows(array):
    return array.reshape(array.shape[0], -1) if array.ndim > 1 else array.reshape(1, -1)


# ---------------------------------------------------------------------- against a twin


def naive_codes(values, levels, draws=None):
    """Entry by entry, in float32 like the real one."""
    codes, scales = np.zeros(values.shape, np.int8), []
    flat_codes, flat_draws = rows(codes), None if draws is None else rows(draws)
    for i, row in enumerate(rows(values)):
        scale = np.float32(np.abs(row).max()) / np.float32(levels)
        scales.append(scale)
        for j, value in enumerate(row):
            ratio = value / scale if scale > 0 else np.float32(0)
            if draws is None:
                code = round(float(ratio))
            else:
                code = int(np.floor(ratio)) + int(flat_draws[i, j] < ratio - np.floor(ratio))
            flat_codes[i, j] = max(-levels, min(levels, code))
    return codes, scales


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("precision", WHOLE)
def test_codes_and_scales_equal_those_of_a_naive_twin(precision, random):
    message, key = draw_message(0), keys.fold(keys.key(3), 1) if random else None
    coded = quantise(message, layout(precision), None, key)
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    draws = keys.uniform(keys.fold(key, 0), (sum(sizes),)).split(sizes) if random else [None] * len(sizes)
    for (name, shape), draw in zip(SHAPES.items(), draws, strict=True):
        noise = None if draw is None else draw.reshape(shape).numpy()
        codes, scales = naive_codes(message["weights"][name].numpy(), WHOLE[precision], noise)
        assert coded["weights"][name].tolist() == codes.tolist()
        assert coded["weights.scales"][name].flatten().tolist() == [float(scale) for scale in scales]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_floats_in_packets_are_rounded_as_torch_does(dtype):
    message = draw_message(1)
    coded = quantise(message, replace(layout(dtype), direction="down"))
    for name, value in message["weights"].items():
        assert torch.equal(coded["weights"][name], value.to(getattr(torch, dtype)))


# ---------------------------------------------------------------------- statistics


@pytest.mark.parametrize("precision", ROUNDED)
def test_random_rounding_is_unbiased(precision):
    """The mean of many roundings of every entry is within five standard errors of the entry."""
    message, packet, many = draw_message(2, dtype=torch.float64), draw_message(3, dtype=torch.float64), 4000
    chosen = replace(layout(precision), dtype=torch.float64)
    all_keys = keys.fold(keys.key(0), torch.arange(many))
    coded = vmap(lambda key: quantise(message, chosen, packet, key))(all_keys)
    heard = vmap(lambda one: restore(one, chosen, packet))(coded)
    for name, value in message["weights"].items():
        sample = heard["weights"][name]
        error = (sample.mean(0) - value).abs() / (sample.std(0) / many**0.5).clamp(min=1e-12)
        assert float(error.max()) < 5, name
        entries = sample.reshape(many, -1)
        assert max(len(entries[:, i].unique()) for i in range(entries.shape[1])) <= 2, "its two neighbours"


def test_draws_depend_on_the_key_and_differ_between_clients():
    message, chosen = draw_message(2), layout("int4")
    one, same, other = (quantise(message, chosen, None, keys.fold(keys.key(0), i)) for i in (1, 1, 2))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(trees.leaves(one), trees.leaves(same), strict=True))
    assert not torch.equal(one["weights"]["fc"], other["weights"]["fc"])


values = hnp.arrays(
    np.float32, (4, 6), elements=st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-20)
)


@pytest.mark.parametrize("precision", WHOLE)
@settings(max_examples=100, deadline=None)
@given(array=values, seed=st.integers(0, 2**40))
def test_the_error_is_at_most_one_step_or_half_a_step_in_packets(precision, array, seed):
    chosen = Layout({"weights": Section({"w": (4, 6)})}, precision=precision)
    message = {"weights": {"w": torch.from_numpy(array)}}
    for key, share in ((keys.key(seed), 1.0), (None, 0.5)):
        coded = quantise(message, chosen, None, key)
        found = restore(coded, chosen)["weights"]["w"].double()
        step = coded["weights.scales"]["w"].double()
        assert bool(((found - message["weights"]["w"].double()).abs() <= share * step * (1 + 1e-4)).all())
        assert int(coded["weights"]["w"].abs().max()) <= WHOLE[precision]


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@settings(max_examples=100, deadline=None)
@given(array=hnp.arrays(np.float32, (4, 6), elements=st.floats(-6e4, 6e4, width=32)), seed=st.integers(0, 2**40))
def test_floating_point_is_rounded_to_one_of_the_two_neighbours(precision, array, seed):
    chosen = Layout({"weights": Section({"w": (4, 6)})}, precision=precision)
    value, dtype = torch.from_numpy(array), getattr(torch, precision)
    code = quantise({"weights": {"w": value}}, chosen, None, keys.key(seed))["weights"]["w"]
    assert code.dtype == dtype
    digits, smallest = (10, 2.0**-24) if dtype is torch.float16 else (7, 2.0**-126)
    gap = np.maximum(np.exp2(np.floor(np.log2(np.maximum(np.abs(array), 1e-38))) - digits), smallest)
    assert bool((np.abs(code.double().numpy() - array.astype(float)) <= gap * (1 + 1e-9)).all())
    exact = value.to(dtype).float() == value
    assert bool((code.float() == value)[exact & (value.abs() > 2.0**-110)].all())


# ---------------------------------------------------------------------- what must be exact


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("precision", WHOLE)
def test_a_negligible_row_is_zero_and_the_others_are_untouched(precision, random):
    """The error is below the share of the tensor's largest number, and no code is drawn in a row without a scale."""
    share, draw = 2.0**-8, torch.Generator().manual_seed(0)
    rows_of = torch.tensor([50.0, 1e-17, -0.3 * share * 50.0, 2 * share * 50.0])
    message = {"weights": {"w": rows_of[:, None] * (0.5 + 0.5 * torch.rand(4, 200, generator=draw))}}
    message["weights"]["w"][:, 0] = rows_of
    plain, chosen = (
        Layout({"weights": Section({"w": (4, 200)}, negligible=n)}, precision=precision) for n in (0, share)
    )
    key = keys.key(5) if random else None
    coded, expected = quantise(message, chosen, None, key), quantise(message, plain, None, key)
    assert coded["weights.scales"]["w"][1:3].tolist() == [[0.0], [0.0]]
    assert not coded["weights"]["w"][1:3].any()
    assert torch.equal(coded["weights"]["w"][[0, 3]], expected["weights"]["w"][[0, 3]])
    assert torch.equal(coded["weights.scales"]["w"][[0, 3]], expected["weights.scales"]["w"][[0, 3]])
    heard = restore(coded, chosen)["weights"]["w"]
    assert float((heard - message["weights"]["w"])[1:3].abs().max()) < share * 50.0


@pytest.mark.parametrize("precision", ROUNDED)
def test_unmoved_numbers_are_exact(precision):
    """A unit that stayed where it was has a scale of zero; an entry that stayed has code zero."""
    packet, message = draw_message(5), draw_message(5)
    message["weights"]["fc"][1] += torch.randn(5, generator=torch.Generator().manual_seed(0))
    message["weights"]["fc"][1, 2] = packet["weights"]["fc"][1, 2]
    for seed in range(20):
        coded = quantise(message, layout(precision), packet, keys.key(seed))
        heard = restore(coded, layout(precision), packet)["weights"]
        moved = torch.zeros(4, 5, dtype=torch.bool)
        moved[1] = True
        moved[1, 2] = False
        assert torch.equal(heard["fc"][~moved], packet["weights"]["fc"][~moved])
        assert all(torch.equal(heard[name], packet["weights"][name]) for name in ("conv", "bias", "gain"))
        if precision in WHOLE:
            assert coded["weights.scales"]["fc"].flatten().bool().tolist() == [False, True, False, False]


@pytest.mark.parametrize("precision", ["float32", *ROUNDED])
def test_the_server_adds_the_difference_to_its_own_weights(precision):
    """Both ends hear the same difference, each added to the weights it has."""
    server, packet, message = (draw_message(seed, dtype=torch.float64) for seed in (6, 7, 8))
    chosen = replace(layout(precision), dtype=torch.float64)
    coded = quantise(message, chosen, packet, keys.key(1))
    at_client, at_server = (restore(coded, chosen, base)["weights"] for base in (packet, server))
    for name in SHAPES:
        torch.testing.assert_close(
            at_server[name] - server["weights"][name], at_client[name] - packet["weights"][name], rtol=0, atol=1e-12
        )
        if precision == "float32":
            torch.testing.assert_close(at_client[name], message["weights"][name], rtol=0, atol=1e-12)


def test_changes_smaller_than_a_step_accumulate():
    """A server that starts again from what it rounded would never move."""
    task_weights = {"weights": {"w": torch.full((1, 4), 0.5)}}
    task_weights["weights"]["w"][0, 0] = 1.0
    down = Layout({"weights": Section({"w": (1, 4)})}, direction="down", precision="int4")
    up = replace(down, direction="up")
    server = task_weights
    for number in range(20):
        packet = restore(quantise(server, down), down)
        local = {"weights": {"w": packet["weights"]["w"] - 0.01}}
        server = restore(quantise(local, up, packet, keys.key(number)), up, server)
    torch.testing.assert_close(server["weights"]["w"], task_weights["weights"]["w"] - 0.2)


def test_removed_numbers_do_not_affect_scales():
    """Neither a row's scale nor its codes depend on them, even on NaN."""
    gating = WeightGating({"w": (2, 3)})
    chosen = Layout({"weights": Section({"w": (2, 3)}, gating.mask)}, {"w": (2, 3)}, precision="int8")
    gates = {"w": torch.tensor([[1.0, 1, 0], [0, 0, 0]])}
    message = {"gates": gates, "weights": {"w": torch.tensor([[1.0, -2, torch.nan], [torch.inf, 3, 4]])}}
    coded = quantise(message, chosen)
    assert coded["weights"]["w"].tolist() == [[64, -127, 0], [0, 0, 0]]
    assert coded["weights.scales"]["w"].flatten().tolist() == [pytest.approx(2 / 127), 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_stays_nan(bad):
    """So that a client that diverged is noticed."""
    for precision in ROUNDED:
        message = draw_message(9)
        message["weights"]["fc"][2, 1] = bad
        coded = quantise(message, layout(precision), draw_message(10), keys.key(0))
        assert not bool(restore(coded, layout(precision), draw_message(10))["weights"]["fc"].isfinite().all())


# ---------------------------------------------------------------------- priors


def test_a_mixtures_packet_has_scales_per_model_and_uploads_refer_to_the_mean():
    network = fedprior.Network(small_net(), torch.zeros(1, 8, 8))
    algorithm = replace(fedprior.algorithm("fedmix", network, components=2), wire=Wire.of("int8/int4"))
    server = algorithm.init(network.params())
    down, up = algorithm.downlink(server), algorithm.uplink(server)
    coded = algorithm.pack(algorithm.broadcast(server, keys.key(0)), down)
    assert {n: tuple(s.shape) for n, s in coded["weights.scales"].items()} == {
        "conv.weight": (2, 4, 1, 1, 1),
        "conv.bias": (2, 1),
        "fc1.weight": (2, 12, 1),
        "fc1.bias": (2, 1),
        "fc2.weight": (2, 4, 1),
        "fc2.bias": (2, 1),
    }
    packet = restore(coded, down)
    middle = {"weights": {name: value.mean(0) for name, value in packet["weights"].items()}}
    sent = quantise(middle, up, packet, keys.key(1))
    assert not any(bool(code.any()) for code in sent["weights"].values())


@pytest.mark.parametrize("wire", ["int8", "int4", "bfloat16"])
def test_clients_see_the_gate_probabilities_that_the_server_has(wire):
    """Rounding moves norms by many T; thresholds move along."""
    network = fedprior.Network(small_net(), torch.zeros(1, 8, 8))
    algorithm = replace(fedprior.algorithm("fedsparse", network), wire=Wire.of(wire))
    server = algorithm.init(network.params())
    for i, v in enumerate(server["thresholds"].values()):
        v += torch.linspace(-0.002, 0.004, len(v)) * (1 + i)
    server = algorithm.prior.prune(server)
    spoken = algorithm.broadcast(server, keys.key(0))
    packet = restore(algorithm.pack(spoken, algorithm.downlink(server)), algorithm.downlink(server))
    norms = [algorithm.prior.gating.joint_norms(state["weights"]) for state in (spoken, packet)]
    assert float((norms[0] - norms[1]).abs().max()) > 1e-4
    for layer, theta in algorithm.prior.gates(spoken).items():
        assert float(theta.min()) < 0.95, "a gate that is in doubt"
        torch.testing.assert_close(algorithm.prior.gates(packet)[layer], theta, rtol=0, atol=2e-3)


def test_float16_suffices_for_weight_wise_thresholds():
    network = fedprior.Network(small_net(), torch.zeros(1, 8, 8))
    algorithm = replace(fedprior.algorithm("fedsparse-unstructured", network), wire=Wire.of("int8"))
    server = algorithm.prior.prune(algorithm.init(network.params()))
    spoken, down = algorithm.broadcast(server, keys.key(0)), algorithm.downlink(server)
    coded = algorithm.pack(spoken, down)
    assert {value.dtype for value in coded["thresholds"].values()} == {torch.float16}
    packet = restore(coded, down)
    for layer, logit in algorithm.prior.logits(spoken).items():
        # A weight near zero cannot be far above its threshold, which is never negative.
        found, gate = algorithm.prior.logits(packet)[layer], spoken["gates"][layer] > 0
        room = packet["weights"][layer].abs() / algorithm.prior.temperature
        assert float((found - torch.minimum(logit, room)).abs()[gate].max()) < 0.3


@pytest.mark.parametrize(
    ("text", "down", "up"),
    [
        ("float32", None, None),
        ("int8", "int8", "int8"),
        ("float32/int4", None, "int4"),
        ("int8/float32", "int8", "float32"),
    ],
)
def test_layouts_have_the_precision_of_their_direction(text, down, up):
    layouts = [Layout({"weights": Section(SHAPES)}, direction=direction) for direction in ("down", "up")]
    assert [Wire.of(text).layout(one).precision for one in layouts] == [down, up]


def test_a_layout_of_another_precision_has_another_fingerprint():
    plain = Layout({"weights": Section(SHAPES)}, direction="up")
    prints = {replace(plain, precision=precision).fingerprint for precision in (None, "float32", *ROUNDED)}
    assert len(prints) == 6
