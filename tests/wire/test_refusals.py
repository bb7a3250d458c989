"""Each check of a received message on its own: a message that only this check can refuse."""

import struct
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedprior.core.errors import WireError
from fedprior.wire import FORMATS, HEADER_BYTES, Layout, Section, count_bytes, decode, encode, quantise, rice

PLAIN = Layout({"weights": Section({"w": (2, 3), "b": (2,)})}, {}, direction="down", wiring="w reads nothing")
ROUNDED = replace(PLAIN, precision="int4", entropy=True)
EVERY = np.ones((1, 6), bool)


def forge(layout: Layout, body: bytes, *, precision: int, flags: int = 0, number: int = 0) -> bytes:
    """A message as the format's description has it, with a checksum that matches."""
    start = b"FEDP" + struct.pack("<BBBB", 1, precision, flags, 0) + layout.fingerprint + struct.pack("<I", number)
    return start + struct.pack("<I", zlib.crc32(start + body)) + body


def message() -> dict:
    return {"weights": {"w": torch.tensor([[7.0, -3, 1], [2, 0, 4]]), "b": torch.tensor([0.5, -3.5])}}


def other_ends() -> dict[str, tuple[Layout, Layout]]:
    """Two ends that differ in one thing only."""

    def sections(**changes: object) -> Layout:
        return replace(ROUNDED, sections={"weights": replace(ROUNDED.sections["weights"], **changes)})

    return {
        "direction": (PLAIN, replace(PLAIN, direction="up")),
        "wiring": (PLAIN, replace(PLAIN, wiring="w reads b")),
        "dtype": (PLAIN, replace(PLAIN, dtype=torch.float64)),
        "gates": (PLAIN, replace(PLAIN, gates={"w": (2,)})),
        "the gates' shape": (replace(PLAIN, gates={"w": (4,)}), replace(PLAIN, gates={"w": (2, 2)})),
        "mask": (
            PLAIN,
            replace(PLAIN, sections={"weights": replace(PLAIN.sections["weights"], mask=lambda gates: {})}),
        ),
        "shapes": (PLAIN, replace(PLAIN, sections={"weights": Section({"w": (3, 2), "b": (2,)})})),
        "precision": (PLAIN, ROUNDED),
        "differences": (ROUNDED, sections(relative=False)),
        "a section's precision": (ROUNDED, sections(precision="float16")),
        "models": (ROUNDED, sections(models=1)),
    }


@pytest.mark.parametrize("differ", other_ends())
def test_ends_that_differ_in_any_detail_refuse_each_other(differ: str) -> None:
    one, other = other_ends()[differ]
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint == replace(one).fingerprint


@pytest.mark.parametrize("number", [1, 6, 8, 7 + 2**31])
@pytest.mark.parametrize("layout", [PLAIN, ROUNDED], ids=["plain", "rounded"])
def test_a_message_of_an_earlier_or_later_round_is_refused(layout: Layout, number: int) -> None:
    data = encode(quantise(message(), layout), layout, number)
    assert decode(data, layout, number)
    with pytest.raises(WireError, match=f"round {number}, expected 7"):
        decode(data, layout, 7)


def test_a_header_with_another_precision_is_refused_despite_its_fingerprint() -> None:
    body = encode(message(), PLAIN)[HEADER_BYTES:]
    assert decode(forge(PLAIN, body, precision=0), PLAIN)
    for precision in (1, 2, 3, 4, 5, 255):
        with pytest.raises(WireError, match="another model"):
            decode(forge(PLAIN, body, precision=precision), PLAIN)


def test_a_message_without_integers_cannot_be_entropy_coded() -> None:
    for layout, precision in ((PLAIN, 0), (replace(PLAIN, precision="float16"), 2)):
        body = encode(quantise(message(), layout), layout)[HEADER_BYTES:]
        assert decode(forge(layout, body, precision=precision), layout)
        with pytest.raises(WireError, match="header bytes"):
            decode(forge(layout, body, precision=precision, flags=1), layout)


def whole(precision: str, scale: float, codes: bytes, flags: int = 0) -> tuple[bytes, Layout]:
    """One row of six codes behind their scale."""
    layout = Layout({"weights": Section({"w": (1, 6)})}, precision=precision)
    body = struct.pack("<f", scale) + codes
    return forge(layout, body, precision=FORMATS[precision].code, flags=flags), layout


@pytest.mark.parametrize(
    ("precision", "scale", "codes", "complaint"),
    [
        ("int8", 1.0, b"\x80" + bytes(5), "out of range"),
        ("int4", 1.0, b"\x08" + bytes(2), "out of range"),
        ("int4", 1.0, b"\x80" + bytes(2), "out of range"),
        ("int8", -1.0, bytes(6), "negative"),
        ("int8", -1e-30, bytes(6), "negative"),
        ("int8", 3e36, bytes(6), "not finite"),
        ("int8", float("inf"), bytes(6), "not finite"),
    ],
)
def test_codes_and_scales_out_of_range_are_refused(precision: str, scale: float, codes: bytes, complaint: str) -> None:
    assert decode(*whole(precision, 1.0, bytes(len(codes))))
    with pytest.raises(WireError, match=complaint):
        decode(*whole(precision, scale, codes))


def test_padding_after_the_last_code_must_be_zero() -> None:
    layout = Layout({"weights": Section({"w": (1, 5)})}, precision="int4")
    for last, fine in ((b"\x01", True), (b"\x11", False)):
        data = forge(layout, struct.pack("<f", 1.0) + bytes(2) + last, precision=5)
        if fine:
            assert decode(data, layout)["weights"]["w"].tolist() == [[0, 0, 0, 0, 1]]
        else:
            with pytest.raises(WireError, match="bits after"):
                decode(data, layout)


def test_bytes_after_a_coded_message_are_refused() -> None:
    table = rice.encode(np.array([[0, 0, 1, 0, -1, 0]], np.int8), EVERY, 127)
    assert decode(*whole("int8", 1.0, table, flags=1))["weights"]["w"].tolist() == [[0, 0, 1, 0, -1, 0]]
    for more in (b"\0", b"\1", bytes(9)):
        with pytest.raises(WireError, match="from what its gates need"):
            decode(*whole("int8", 1.0, table + more, flags=1))


# ---------------------------------------------------------------------- the code of variable length


def table(first: int, bits: str) -> memoryview:
    """A table from its first byte and its bits as text, padded with zeros."""
    bits += "0" * (-len(bits) % 8)
    return memoryview(bytes([first, *(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))]))


def read(data: memoryview, levels: int, columns: int = 2) -> list[int]:
    codes, rest = rice.decode(data, np.ones(1, bool), columns, None, levels)
    assert not len(rest)
    return codes[0].tolist()


def test_an_impossible_width_is_refused() -> None:
    """Seven has widths 0, 1 and 2; with one more, eight zero bits would still be read as two zeros."""
    assert read(table(0, "00"), 7) == [0, 0]
    for levels, widths in ((7, 3), (127, 7)):
        for k in range(8):
            data = table(k, "0" * 2 * (k + 1))
            if k < widths:
                assert read(data, levels) == [0, 0]
            else:
                with pytest.raises(WireError):
                    rice.decode(data, np.ones(1, bool), 2, None, levels)


def test_a_code_beyond_the_levels_is_refused() -> None:
    """With levels that are not all ones in binary the bits can say more: two low bits and a unary one make seven."""
    one_of_five = table(2, "1 0  0 0  1 0  0".replace(" ", ""))  # bit 0, bit 1, more?, sign
    assert read(one_of_five, 5) == [5, 0]
    with pytest.raises(WireError, match="out of range"):
        rice.decode(table(2, "1010100"), np.ones(1, bool), 2, None, 5)


def test_unused_bits_of_the_first_byte_must_be_zero() -> None:
    for bit in (16, 32, 64, 128):
        with pytest.raises(WireError):
            rice.decode(table(bit, "00"), np.ones(1, bool), 2, None, 127)


def test_bits_after_the_codes_are_refused() -> None:
    for place in range(2, 8):
        with pytest.raises(WireError, match="bits after"):
            rice.decode(
                table(0, "00" + "".join(str(int(i == place)) for i in range(2, 8))), np.ones(1, bool), 2, None, 7
            )


def test_a_table_that_ends_too_early_is_refused_before_it_has_memory() -> None:
    columns = 2**26
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="ends inside"):
            rice.decode(table(6, "1" * 800), np.ones(1, bool), columns, None, 127)
        assert tracemalloc.get_traced_memory()[1] < columns / 8
    finally:
        tracemalloc.stop()
    for bits in ("", "0"):
        with pytest.raises(WireError, match="ends inside"):
            rice.decode(table(0, bits), np.ones(1, bool), 9 + len(bits), None, 127)


@pytest.mark.parametrize("live", [False, True])
def test_a_table_is_counted_as_it_is_written(live: bool) -> None:
    """Also one without a single live row: it has no columns to mark."""
    codes = np.zeros((3, 50), np.int8)
    codes[:, 7] = live
    rows = np.full(3, live)
    written = np.broadcast_to(rows[:, None], codes.shape)
    bits = rice.encode(codes, written, 7)
    assert len(bits) == (1 + -(-(50 + 3 * 1 + 3 + 3) // 8) if live else 1)
    counted = rice.count_bytes([(torch.from_numpy(codes), torch.from_numpy(rows), None)], 7)
    assert int(counted) == len(bits)
    read_back, _ = rice.decode(memoryview(bits), rows, 50, None, 7)
    assert np.array_equal(read_back, codes)


def test_a_message_too_small_for_entropy_coding_is_counted_as_sent() -> None:
    draw = torch.Generator().manual_seed(0)
    values = {"weights": {"w": torch.randn(2, 3, generator=draw), "b": torch.randn(2, generator=draw)}}
    for entropy in (False, True):
        layout = replace(ROUNDED, entropy=entropy)
        coded = quantise(values, layout)
        data = encode(coded, layout)
        assert int(count_bytes(coded, layout)) == len(data) == HEADER_BYTES + 4 * 3 + 4
