"""Masks in their own code: what comes back is what was sent, the length is foreseen, and close to the entropy."""

import math
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprior import wire
from fedprior.core.errors import WireError
from fedprior.wire import masks
from fedprior.wire.layout import Layout, Section

bits = st.lists(st.booleans(), min_size=1, max_size=300).map(lambda found: np.array(found, bool))


@given(bits)
def test_every_mask_comes_back_and_its_length_is_foreseen(mask):
    data = masks.encode(mask)
    found, rest = masks.decode(memoryview(data + b"next"), mask.size)
    assert (found == mask).all()
    assert bytes(rest) == b"next"
    assert int(masks.count_bytes(torch.from_numpy(mask))) == len(data)


def test_ranks_are_places_in_the_list_of_all_arrangements():
    """Against a list: of all blocks with two ones, in the order of their numbers."""
    pairs = sorted(1 << high | 1 << low for high in range(masks.BLOCK) for low in range(high))
    blocks = np.array([[number >> place & 1 for place in range(masks.BLOCK)] for number in pairs], bool)
    assert masks._ranks(blocks).tolist() == list(range(comb(masks.BLOCK, 2)))


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 0.99])
def test_masks_take_hardly_more_than_their_entropy(share):
    mask = np.random.default_rng(1).random(200_000) < share
    p = mask.mean()
    entropy = -(p * math.log2(p) + (1 - p) * math.log2(1 - p))
    assert entropy < 8 * len(masks.encode(mask)) / mask.size < entropy + 0.02


@given(bits, st.data())
def test_damaged_masks_are_refused_or_read_as_another_mask(mask, data):
    good = bytearray(masks.encode(mask))
    good[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found, _ = masks.decode(memoryview(bytes(good[: data.draw(st.integers(0, len(good)))])), mask.size)
    except WireError:
        return
    assert found.shape == mask.shape


def test_a_message_takes_the_shorter_way_and_is_counted():
    gates = {"a": (400,), "b": (3, 50)}
    layout = Layout({"w": Section({"w": (2,)})}, gates, masked=True, direction="up")
    for share in (0.02, 0.5):
        torch.manual_seed(0)
        message = {
            "gates": {name: (torch.rand(shape) < share).float() for name, shape in gates.items()},
            "w": {"w": torch.ones(2)},
        }
        data = wire.encode(message, layout, 3)
        assert len(data) == wire.message_bytes(message, layout)
        plain = wire.HEADER_BYTES + (550 + 7) // 8 + 8
        assert (len(data) < plain) == (share == 0.02)
        assert len(data) <= plain
        found = wire.decode(data, layout, 3)
        for name in gates:
            assert torch.equal(found["gates"][name], message["gates"][name])
