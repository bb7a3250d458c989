"""The code of variable length against a naive twin that writes one code after the other, as text."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from fedprior.core.errors import WireError
from fedprior.wire import rice

LEVELS = [7, 127]


def naive(codes: np.ndarray, written: np.ndarray, levels: int) -> bytes:
    """Every code as a string of bits by the book; then the strings' letters in the order of the planes."""
    columns = [j for j in range(codes.shape[1]) if written[:, j].any()]
    moved = [j for j in columns if codes[:, j].any()]
    best = None
    for marked, chosen in ((False, columns), (True, moved)):
        head = "".join(str(int(j in moved)) for j in columns) if marked else ""
        places = [(i, j) for i in range(codes.shape[0]) for j in chosen if written[i, j]]
        for k in range(levels.bit_length()):
            words, signs = [], ""
            for place in places:
                code = int(codes[place])
                size = abs(code)
                unary = "1" * (size >> k) + "0"
                low = "".join(str(size >> bit & 1) for bit in range(k))
                words.append(low + (unary if size >> k < levels >> k else unary[:-1]))
                signs += "" if code == 0 else str(int(code < 0))
            length = len(head) + sum(map(len, words)) + len(signs)
            if best is None or length < best[0]:
                best = (length, k + 8 * marked, head, words, signs)
    _, first, head, words, signs = best
    longest = max(map(len, words), default=0)
    bits = head + "".join(w[place] for place in range(longest) for w in words if place < len(w)) + signs
    bits += "0" * (-len(bits) % 8)
    return bytes([first, *(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))])


@st.composite
def tables(draw, levels):
    """Codes of any spread, with silent rows and columns, of which a mask leaves some."""
    shape = draw(st.sampled_from([(1, 1), (1, 9), (5, 7), (3, 17), (0, 4), (2, 0)]))
    noise = np.random.default_rng(draw(st.integers(0, 10**6)))
    spread = draw(st.sampled_from([0.0, 0.4, 2.0, 30.0, 300.0]))
    codes = np.rint(spread * noise.standard_normal(shape)).clip(-levels, levels).astype(np.int8)
    rows, silent = noise.random(shape[0]) < draw(st.sampled_from([0.5, 1.0])), noise.random(shape[1]) < 0.4
    mask = noise.random(shape) < 0.7 if draw(st.booleans()) else None
    written = np.broadcast_to(rows[:, None], shape) & (True if mask is None else mask)
    return codes * written * ~(silent if draw(st.booleans()) else False), written, rows, mask


@pytest.mark.parametrize("levels", LEVELS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_codes_match_a_hand_written_example_and_round_trip(levels, data):
    codes, written, rows, mask = data.draw(tables(levels))
    codes = codes.astype(np.int8)
    bits = rice.encode(codes, written, levels)
    assert bits == naive(codes, written, levels)
    read, rest = rice.decode(memoryview(bits + b"more"), rows, codes.shape[1], mask, levels)
    assert read.tolist() == codes.tolist()
    assert bytes(rest) == b"more"
    table = (torch.from_numpy(codes), torch.from_numpy(rows), None if mask is None else torch.from_numpy(mask))
    other = (torch.ones(2, 3, dtype=torch.int8), torch.ones(2, dtype=torch.bool), None)
    assert int(rice.count_bytes([table], levels)) == len(bits)
    alone = len(rice.encode(np.ones((2, 3), np.int8), np.ones((2, 3), bool), levels))
    assert int(rice.count_bytes([other, table], levels)) == alone + len(bits)


@pytest.mark.parametrize("levels", LEVELS)
def test_lengths_of_stacked_tables_are_known(levels):
    draw = np.random.default_rng(0)
    codes = np.stack([draw.integers(-levels, levels + 1, (4, 10)) // (i * i + 1) for i in range(5)]).astype(np.int8)
    written = draw.random((5, 4, 10)) < 0.7
    codes = codes * written
    rows = torch.ones(4, dtype=torch.bool)
    counted = vmap(lambda c, w: rice.count_bytes([(c, rows, w)], levels))(
        torch.from_numpy(codes), torch.from_numpy(written)
    )
    assert counted.tolist() == [len(rice.encode(c, w, levels)) for c, w in zip(codes, written, strict=True)]


@pytest.mark.parametrize(("levels", "width"), [(7, 4), (127, 8)])
def test_the_code_is_near_the_entropy_and_never_costs_more_than_a_byte(levels, width):
    draw = np.random.default_rng(1)
    even = draw.integers(-levels, levels + 1, (1, 4001)).astype(np.int8)
    assert len(rice.encode(even, np.ones((1, 4001), bool), levels)) <= 1 + (4001 * width + 7) // 8
    for spread in (0.12, 0.25):
        codes = np.rint(draw.laplace(size=(100, 2000)) * spread * levels).clip(-levels, levels).astype(np.int8)
        share = np.unique(codes, return_counts=True)[1] / codes.size
        entropy = -(share * np.log2(share)).sum()
        bits = 8 * len(rice.encode(codes, np.ones(codes.shape, bool), levels)) / codes.size
        assert entropy <= bits < 1.1 * entropy


@pytest.mark.parametrize("levels", LEVELS)
@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60), shape=st.sampled_from([(1, 20), (4, 8), (3, 0)]), masked=st.booleans())
def test_random_bytes_are_decoded_or_refused(levels, data, shape, masked):
    rows = np.arange(shape[0]) % 2 == 0
    mask = np.arange(shape[0] * shape[1]).reshape(shape) % 3 > 0 if masked else None
    try:
        codes, rest = rice.decode(memoryview(data), rows, shape[1], mask, levels)
    except WireError:
        return
    assert codes.shape == shape
    assert np.abs(codes.astype(int)).max(initial=0) <= levels
    assert not codes[~rows].any()
    assert mask is None or not codes[~mask].any()
    assert len(rest) < len(data)


@pytest.mark.parametrize("levels", LEVELS)
def test_truncated_or_padded_codes_are_refused(levels):
    codes, rows = np.array([[0, 1, -2, 3, 0, 0, 1, 0, 0, 0, 0, 0]] * 3, np.int8), np.ones(3, bool)
    bits = rice.encode(codes, np.ones(codes.shape, bool), levels)
    for length in range(len(bits)):
        with pytest.raises(WireError):
            rice.decode(memoryview(bits[:length]), rows, 12, None, levels)
    assert bits[0] == 8 | (bits[0] & 7), "columns are marked"
    with pytest.raises(WireError):
        rice.decode(memoryview(bits[:-1] + bytes([bits[-1] | 1])), rows, 12, None, levels)
    for first in (7, 16, 255):
        with pytest.raises(WireError):
            rice.decode(memoryview(bytes([first]) + bits[1:]), rows, 12, None, levels)


def test_a_few_bytes_that_claim_a_terabyte_are_refused_at_once():
    for first in range(256):
        with pytest.raises(WireError):
            rice.decode(memoryview(bytes([first]) + b"\xff" * 100), np.ones(1, bool), 10**12, None, 127)
