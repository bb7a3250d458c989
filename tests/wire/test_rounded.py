"""Rounded messages as bytes: every code comes back, the length is known, and nothing else is ever accepted."""

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codec import LAYOUTS, NAMES, make_message, memory_of_refusal, sizes, survivors
from torch.func import vmap

from fedprior.catalogue.models import LeNet5
from fedprior.core.errors import WireError
from fedprior.core.trees import leaves
from fedprior.units import UnitGating, WeightGating, find_structure
from fedprior.wire import (
    FORMATS,
    HEADER_BYTES,
    Layout,
    Section,
    count_bytes,
    decode,
    encode,
    message_bytes,
    quantise,
    restore,
)

ROUNDED = ["float16", "bfloat16", "int8", "int4"]
WIDTH = {"float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}


def layout_of(name, precision, entropy=False, dtype=torch.float32):
    plain = LAYOUTS[name](dtype)
    if "thresholds" in plain.sections:
        kept = replace(plain.sections["thresholds"], precision="float32")
        plain = replace(plain, sections={**plain.sections, "thresholds": kept})
    return replace(plain, precision=precision, entropy=entropy)


def example(name, precision, entropy=False, dtype=torch.float32, seed=0, spread=1.0):
    """A rounded message with some gates closed; a small spread beside one large entry gives small codes."""
    layout = layout_of(name, precision, entropy, dtype)
    gates, numbers = sizes(layout)
    draw = np.random.default_rng(seed)
    values = spread * draw.standard_normal(numbers)
    values[::11] = 1.0
    message = make_message(name, layout, (draw.random(gates) < 0.6).tolist(), values.astype(f"f{dtype.itemsize}"))
    return quantise(message, layout), layout


def lopsided(precision, entropy=True):
    """Mostly small codes, in a tensor that is large enough for a code of variable length to pay; half of it gated."""
    gating = WeightGating({"w": (6, 40), "b": (3,)})
    sections = {"weights": Section(gating.shapes, gating.mask), "more": Section({"v": (5, 30)})}
    layout = Layout(sections, gating.gate_shapes, precision=precision, entropy=entropy)
    draw = torch.Generator().manual_seed(0)
    w, v = 0.1 * torch.randn(6, 40, generator=draw), 0.1 * torch.randn(5, 30, generator=draw)
    w[:, 0], v[:, 0], v[2], v[:, 5:9] = 1.0, -1.0, 0.0, 0.0
    gates = {"w": (torch.rand(6, 40, generator=draw) < 0.5).float()}
    gates["w"][:, 0] = 1.0
    message = {"gates": gates, "weights": {"w": w, "b": torch.ones(3)}, "more": {"v": v}}
    return quantise(message, layout), layout


def forge(layout, body, flags=0, number=0):
    precision = FORMATS[layout.precision].code
    start = b"FEDP" + struct.pack("<BBBB", 1, precision, flags, 0) + layout.fingerprint + struct.pack("<I", number)
    return start + struct.pack("<I", zlib.crc32(start + body)) + body


def same(one, other):
    first, second = dict(leaves(one)), dict(leaves(other))
    assert list(first) == list(second)
    return all(first[path].dtype == second[path].dtype and torch.equal(first[path], second[path]) for path in first)


# ---------------------------------------------------------------------- what goes in comes out


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.0, 0.05, 1.0, 1e4]), double=st.booleans())
def test_a_rounded_message_survives_the_round_trip(name, precision, entropy, seed, spread, double):
    coded, layout = example(name, precision, entropy, torch.float64 if double else torch.float32, seed, spread)
    data = encode(coded, layout, 9)
    received = decode(data, layout, 9)
    assert same(coded, received)
    assert message_bytes(coded, layout) == len(data)
    assert same(restore(coded, layout), restore(received, layout))
    assert all(value.dtype == layout.dtype for _, value in leaves(restore(received, layout)))


@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("name", NAMES)
def test_without_entropy_coding_a_message_costs_its_survivors(name, precision):
    """Counted by hand: bits per entry, four bytes per unit with a scale, thresholds in full."""
    coded, layout = example(name, precision)
    kept = survivors(name, coded.get("gates", {}))
    entries = sum(int(mask.sum()) for mask in kept["weights"].values())
    units = sum(int(m.flatten(1).any(1).sum()) if m.dim() > 1 else int(m.any()) for m in kept["weights"].values())
    thresholds = sum(int(mask.sum()) for mask in kept.get("thresholds", {}).values())
    expected = HEADER_BYTES + -(-layout.gate_count // 8) + -(-entries * WIDTH[precision] // 8) + 4 * thresholds
    assert len(encode(coded, layout)) == expected + (4 * units if precision.startswith("int") else 0)


def test_the_format_is_as_described_byte_by_byte():
    layout = Layout({"weights": Section({"w": (2, 3), "b": (2,)})}, precision="int4")
    coded = quantise(
        {"weights": {"w": torch.tensor([[7.0, -3, 1], [0, 0, 0]]), "b": torch.tensor([0.5, -3.5])}}, layout
    )
    body = struct.pack("<3f", 1.0, 0.0, 0.5) + bytes([0xD7, 0x01, 0x00, 0x91])
    assert encode(coded, layout, 4) == forge(layout, body, number=4)


def test_entropy_coding_is_used_only_where_it_is_shorter():
    for precision in ("int8", "int4"):
        with_it, without = (encode(*lopsided(precision, entropy)) for entropy in (True, False))
        assert (with_it[6], without[6]) == (1, 0)
        assert len(with_it) < 0.85 * len(without)
        # The tensors of this network are too small: each would cost a byte more.
        with_it, without = (encode(*example("dense", precision, entropy)) for entropy in (True, False))
        assert with_it == without


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_an_entropy_coded_message_survives_the_round_trip(precision):
    coded, layout = lopsided(precision)
    data = encode(coded, layout, 3)
    assert same(decode(data, layout, 3), coded)
    assert message_bytes(coded, layout) == len(data)
    assert same(decode(data, replace(layout, entropy=False)), coded), "every receiver reads it"


def test_lengths_are_counted_for_a_stack_of_messages():
    messages = [example("units", "int4", entropy=True, seed=seed, spread=0.3) for seed in range(6)]
    layout = messages[0][1]
    stacked = {
        section: {name: torch.stack([m[section][name] for m, _ in messages]) for name in messages[0][0][section]}
        for section in messages[0][0]
    }
    counted = vmap(lambda message: count_bytes(message, layout))(stacked)
    assert counted.tolist() == [len(encode(message, layout)) for message, _ in messages]


def test_an_int4_lenet5_is_an_eighth():
    model = LeNet5(3, 32, 10)
    params = {name: p.detach() for name, p in model.named_parameters()}
    layout = Layout({"weights": Section({name: tuple(p.shape) for name, p in params.items()})}, precision="int4")
    scales = 32 + 64 + 512 + 10 + 4
    assert message_bytes(quantise({"weights": params}, layout), layout) == HEADER_BYTES + 878_538 // 2 + 4 * scales


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("precision", ROUNDED)
def test_damaged_messages_are_refused(precision, entropy):
    coded, layout = lopsided(precision, entropy)
    data = encode(coded, layout, 5)
    body, flags = data[HEADER_BYTES:], data[6]
    assert flags == int(entropy and precision.startswith("int"))
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length], layout)
        if length < len(body):
            with pytest.raises(WireError):
                decode(forge(layout, body[:length], flags), layout)
    for extra in (b"\0", b"\xff" * 3, bytes(1000)):
        with pytest.raises(WireError):
            decode(forge(layout, body + extra, flags), layout)
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(WireError):
            decode(bytes(damaged), layout)


@pytest.mark.parametrize("flags", [0, 1])
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(body=st.binary(max_size=250))
def test_random_bytes_after_a_valid_header_are_refused_or_decoded(name, precision, flags, body):
    layout = layout_of(name, precision)
    try:
        message = decode(forge(layout, body, flags), layout)
    except WireError:
        return
    assert all(bool(leaf.isfinite().all()) for _, leaf in leaves(restore(message, layout)))
    assert same(decode(encode(message, layout), layout), message)
    if not flags:
        assert encode(message, layout) == forge(layout, body)


@pytest.mark.parametrize("precision", ["int8", "int4"])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_random_codes_after_scales_are_decoded_if_in_range(precision, data):
    layout = Layout({"weights": Section({"w": (3, 5)})}, precision=precision)
    size = 15 if precision == "int8" else 8
    raw = data.draw(st.binary(min_size=size, max_size=size))
    if precision == "int8":
        fine = b"\x80" not in raw
    else:
        nibbles = [half for byte in raw for half in (byte & 15, byte >> 4)]
        fine = 8 not in nibbles[:15] and nibbles[15] == 0
    try:
        decode(forge(layout, struct.pack("<3f", 1, 2, 3) + raw), layout)
    except WireError:
        assert not fine
    else:
        assert fine


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 3e38])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_scales_that_are_not_finite_or_are_negative_are_refused(precision, bad):
    layout = Layout({"weights": Section({"w": (1, 2)})}, precision=precision)
    coded = quantise({"weights": {"w": torch.ones(1, 2)}}, layout)
    body = encode(coded, layout)[HEADER_BYTES:]
    with pytest.raises(WireError, match=r"not finite|negative"):
        decode(forge(layout, struct.pack("<f", bad) + body[4:]), layout)
    if not np.isfinite(bad):
        with pytest.raises(WireError, match="not finite"):
            encode({**coded, "weights.scales": {"w": torch.full((1, 1), bad)}}, layout)


@pytest.mark.parametrize("precision", ROUNDED)
def test_another_precision_is_another_model(precision):
    coded, layout = example("units", precision)
    data = encode(coded, layout)
    for other in (None, "float32", *ROUNDED):
        if other != precision:
            with pytest.raises(WireError, match="another model"):
                decode(data, replace(layout, precision=other))


def test_meaningless_flags_are_refused():
    for precision, flags in (("int8", 2), ("int8", 129), ("float16", 1)):
        coded, layout = example("units", precision)
        with pytest.raises(WireError, match="header bytes"):
            decode(forge(layout, encode(coded, layout)[HEADER_BYTES:], flags), layout)


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("flags", [0, 1])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_tiny_message_for_a_terabyte_model_is_refused_without_allocating(precision, flags):
    dense = Layout({"weights": Section({"w": (1, 10**12)})}, precision=precision)
    for body in (b"", b"\0" * 4, struct.pack("<f", 1.0) + b"\0" * 100, struct.pack("<f", 1.0) + b"\3" + b"\xff" * 100):
        assert memory_of_refusal(forge(dense, body, flags), dense) < 200_000


@pytest.mark.parametrize("flags", [0, 1])
def test_a_huge_message_for_a_tiny_model_is_refused_without_a_copy(flags):
    for name in NAMES:
        layout = layout_of(name, "int4")
        assert memory_of_refusal(forge(layout, bytes(20_000_000), flags), layout) < 200_000


def test_gates_without_codes_make_the_receiver_allocate_no_weights():
    gating = UnitGating(find_structure(LeNet5(3, 32, 10), torch.randn(3, 32, 32)))
    layout = Layout({"weights": Section(gating.shapes, gating.mask)}, gating.gate_shapes, precision="int4")
    for flags in (0, 1):
        assert memory_of_refusal(forge(layout, b"\xff" * 76 + b"\0" * 3000, flags), layout) < 2 * 4 * 878_538
