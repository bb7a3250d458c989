"""Messages survive the wire to the last bit, cost what they should, and nothing else is ever accepted.

`forge` writes a message from the format's description, so that damage can be put behind a checksum that matches.
"""

import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedprior.catalogue.models import LeNet5, LogisticRegression
from fedprior.core.errors import WireError
from fedprior.core.trees import Gates, Params, Tree, leaves
from fedprior.units import Gating, UnitGating, WeightGating, find_structure
from fedprior.wire import HEADER_BYTES, Layout, Section, decode, encode, message_bytes


def tiny_net() -> nn.Module:
    """11 gates, so that the bitmap has padding; weights of one to three dimensions; a flattening."""
    return nn.Sequential(
        nn.Conv1d(1, 3, 2), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)
    )


SHAPES = {name: tuple(p.shape) for name, p in tiny_net().named_parameters()}
UNITS = UnitGating(find_structure(tiny_net(), torch.randn(1, 3)))
WEIGHTS = WeightGating({"a": (3, 5), "b": (2, 2, 2), "bias": (3,)})


def dense_layout(dtype: torch.dtype = torch.float32) -> Layout:
    return Layout({"weights": Section(SHAPES)}, dtype=dtype)


def gated_layout(gating: Gating, dtype: torch.dtype = torch.float32, thresholds: bool = False) -> Layout:
    sections = {"weights": Section(gating.shapes, gating.mask)}
    if thresholds:
        sections["thresholds"] = Section(gating.gate_shapes, dict)
    return Layout(sections, gating.gate_shapes, dtype)


LAYOUTS: dict[str, Callable[[torch.dtype], Layout]] = {
    "dense": dense_layout,
    "units": lambda dtype: gated_layout(UNITS, dtype),
    "units and thresholds": lambda dtype: gated_layout(UNITS, dtype, thresholds=True),
    "weights": lambda dtype: gated_layout(WEIGHTS, dtype),
}
NAMES = list(LAYOUTS)
DTYPES = [torch.float32, torch.float64]


# ---------------------------------------------------------------------- messages with a known content


def survivors(name: str, gates: Gates) -> dict[str, Params]:
    """Which entries travel, said by hand for the three networks above."""
    if name == "dense":
        return {"weights": {key: torch.ones(shape, dtype=torch.bool) for key, shape in SHAPES.items()}}
    open_ = {layer: gate > 0 for layer, gate in gates.items()}
    if name == "weights":
        return {"weights": {**open_, "bias": torch.ones(3, dtype=torch.bool)}}
    conv, fc = open_["0"], open_["4"]
    columns = torch.tensor([bool(conv[j // 2]) for j in range(6)])
    weights = {
        "0.weight": conv[:, None, None].expand(3, 1, 2),
        "0.bias": conv,
        "1.weight": conv,
        "1.bias": conv,
        "4.weight": fc[:, None] & columns[None, :],
        "4.bias": fc,
        "6.weight": fc[None, :].expand(2, 8),
        "6.bias": torch.ones(2, dtype=torch.bool),
    }
    return {"weights": weights} | ({"thresholds": open_} if "thresholds" in name else {})


def make_message(name: str, layout: Layout, bits: list[bool], numbers: np.ndarray) -> Tree:
    """A message with these gates and values; what does not travel is zero."""
    flags, values = iter(bits), iter(torch.from_numpy(numbers))
    gates = {
        layer: torch.tensor([float(next(flags)) for _ in range(torch.Size(shape).numel())], dtype=layout.dtype).reshape(
            shape
        )
        for layer, shape in layout.gates.items()
    }
    message: Tree = {"gates": gates} if layout.gates else {}
    kept = survivors(name, gates)
    for section, content in layout.sections.items():
        message[section] = {}
        for key, shape in content.shapes.items():
            value = torch.stack([next(values) for _ in range(torch.Size(shape).numel())]).reshape(shape)
            message[section][key] = torch.where(kept[section][key], value, 0.0)
    return message


def sizes(layout: Layout) -> tuple[int, int]:
    numbers = sum(torch.Size(shape).numel() for part in layout.sections.values() for shape in part.shapes.values())
    return layout.gate_count, numbers


@st.composite
def messages(draw: Any, name: str, dtype: torch.dtype) -> tuple[Tree, Layout]:
    layout = LAYOUTS[name](dtype)
    gates, numbers = sizes(layout)
    width = 8 * dtype.itemsize
    finite = st.floats(width=width, allow_nan=False, allow_infinity=False)
    bits = draw(st.lists(st.booleans(), min_size=gates, max_size=gates))
    values = draw(hnp.arrays(np.dtype(f"f{dtype.itemsize}"), numbers, elements=finite))
    return make_message(name, layout, bits, values), layout


def example(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tree, Layout]:
    layout = LAYOUTS[name](dtype)
    gates, numbers = sizes(layout)
    draw = np.random.default_rng(len(name))
    bits = (draw.random(gates) < 0.6).tolist()
    return make_message(name, layout, bits, draw.standard_normal(numbers).astype(f"f{dtype.itemsize}")), layout


def bit_pattern(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int64).flatten().tolist()


def forge(
    layout: Layout, body: bytes, *, magic: bytes = b"FEDP", version: int = 1, spare: bytes = b"\0\0", number: int = 0
) -> bytes:
    """Any body behind a header and checksum that are right for the layout."""
    precision = {torch.float32: 0, torch.float64: 1}[layout.dtype]
    start = magic + struct.pack("<BB", version, precision) + spare + layout.fingerprint + struct.pack("<I", number)
    return start + struct.pack("<I", zlib.crc32(start + body)) + body


# ---------------------------------------------------------------------- what goes in comes out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_message_survives_bit_for_bit(name, dtype, data):
    message, layout = data.draw(messages(name, dtype))
    encoded = encode(message, layout, 7)
    received = decode(encoded, layout, 7)
    sent, got = dict(leaves(message)), dict(leaves(received))
    assert list(got) == list(sent)
    for path, value in sent.items():
        assert got[path].dtype == dtype
        assert got[path].shape == value.shape
        assert bit_pattern(got[path]) == bit_pattern(value), path
    assert message_bytes(message, layout) == len(encoded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_message_costs_its_survivors_and_one_bit_per_gate(name, dtype):
    message, layout = example(name, dtype)
    kept = survivors(name, message.get("gates", {}))
    numbers = sum(int(mask.sum()) for section in kept.values() for mask in section.values())
    expected = HEADER_BYTES + -(-layout.gate_count // 8) + numbers * dtype.itemsize
    assert len(encode(message, layout)) == message_bytes(message, layout) == expected


def test_the_format_is_as_described_byte_by_byte():
    layout = gated_layout(UNITS, thresholds=True)
    gates = {"0": torch.tensor([1.0, 0, 1]), "4": torch.tensor([0.0, 1, 0, 0, 0, 0, 0, 1])}
    weights = {key: torch.arange(torch.Size(s).numel(), dtype=torch.float32).reshape(s) for key, s in SHAPES.items()}
    thresholds = {"0": torch.tensor([0.5, 9, 1.5]), "4": torch.tensor([9, 2.5, 9, 9, 9, 9, 9, 3.5])}
    values = [
        *(0, 1, 4, 5),  # 0.weight, rows 0 and 2
        *(0, 2, 0, 2, 0, 2),  # 0.bias, 1.weight, 1.bias
        *(6, 7, 10, 11, 42, 43, 46, 47),  # 4.weight, rows 1 and 7, columns of channels 0 and 2
        *(1, 7),  # 4.bias
        *(1, 7, 9, 15),  # 6.weight, columns 1 and 7
        *(0, 1),  # 6.bias
        *(0.5, 1.5, 2.5, 3.5),  # thresholds of open gates
    ]
    body = bytes([0b10101000, 0b00100000]) + struct.pack("<30f", *values)
    message = {"weights": weights, "gates": gates, "thresholds": thresholds}
    assert encode(message, layout, 3) == forge(layout, body, number=3)


def test_sections_outside_the_layout_are_not_sent():
    message, layout = example("units")
    with_more = {**message, "floored": {"0": torch.ones(())}, "thresholds": {"0": torch.ones(3)}}
    assert encode(with_more, layout) == encode(message, layout)
    assert set(decode(encode(with_more, layout), layout)) == {"gates", "weights"}


def test_what_a_closed_gate_hides_is_not_sent():
    message, layout = example("units")
    noisy = {**message, "weights": {key: torch.where(v == 0, torch.nan, v) for key, v in message["weights"].items()}}
    assert encode(noisy, layout) == encode(message, layout)


def test_all_closed_and_all_open_are_messages_too():
    for value in (False, True):
        layout = gated_layout(UNITS, thresholds=True)
        gates, numbers = sizes(layout)
        message = make_message("units and thresholds", layout, [value] * gates, np.ones(numbers, np.float32))
        assert dict(leaves(decode(encode(message, layout), layout))).keys() == dict(leaves(message)).keys()
        expected = numbers if value else 2
        assert len(encode(message, layout)) == HEADER_BYTES + 2 + 4 * expected


def test_a_message_may_hold_only_gates():
    gating = WeightGating({"w": (2, 3)})
    layout = gated_layout(gating)
    message = {"gates": {"w": torch.zeros(2, 3)}, "weights": {"w": torch.zeros(2, 3)}}
    data = encode(message, layout)
    assert len(data) == HEADER_BYTES + 1
    assert not decode(data, layout)["weights"]["w"].any()


def test_a_received_message_does_not_share_memory_with_the_bytes():
    message, layout = example("dense")
    data = bytearray(encode(message, layout))
    received = decode(data, layout)
    data[:] = bytes(len(data))
    assert all(torch.equal(value, message["weights"][key]) for key, value in received["weights"].items())


# ---------------------------------------------------------------------- the paper's networks


@pytest.mark.parametrize("model", [LeNet5(3, 32, 10), LogisticRegression(784, 10)], ids=lambda m: type(m).__name__)
def test_a_dense_message_is_four_bytes_per_parameter_and_little_else(model):
    params = {name: p.detach() for name, p in model.named_parameters()}
    layout = Layout({"weights": Section({name: tuple(p.shape) for name, p in params.items()})})
    plain = 4 * sum(p.numel() for p in model.parameters())
    data = encode({"weights": params}, layout)
    assert 0 <= len(data) - plain < 0.001 * plain
    received = decode(data, layout)["weights"]
    assert all(torch.equal(received[name], value) for name, value in params.items())


def test_a_gated_lenet5_pays_one_bit_per_unit():
    gating = UnitGating(find_structure(LeNet5(3, 32, 10), torch.randn(3, 32, 32)))
    layout = gated_layout(gating)
    params = {name: p.detach() for name, p in LeNet5(3, 32, 10).named_parameters()}
    draw = torch.Generator().manual_seed(0)
    gates = {layer: (torch.rand(shape, generator=draw) < 0.4).float() for layer, shape in gating.gate_shapes.items()}
    a, b, c = (int(gates[layer].sum()) for layer in ("conv1", "conv2", "fc1"))
    left = a * 76 + b * (a * 25 + 1) + c * (b * 25 + 1) + 10 * (c + 1)
    assert len(encode({"weights": params, "gates": gates}, layout)) == HEADER_BYTES + 608 // 8 + 4 * left


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("name", NAMES)
def test_a_message_cut_anywhere_is_refused(name):
    message, layout = example(name)
    data = encode(message, layout)
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length], layout)


@pytest.mark.parametrize("name", NAMES)
def test_a_body_cut_anywhere_is_refused_even_with_a_matching_checksum(name):
    message, layout = example(name)
    body = encode(message, layout)[HEADER_BYTES:]
    assert forge(layout, body) == encode(message, layout)
    for length in range(len(body)):
        with pytest.raises(WireError):
            decode(forge(layout, body[:length]), layout)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extra", [1, 2, 3, 4, 8, 1000])
def test_a_message_with_trailing_bytes_is_refused(name, extra):
    message, layout = example(name)
    data = encode(message, layout)
    for more in (bytes(extra), b"\xff" * extra, data[:extra]):
        with pytest.raises(WireError):
            decode(data + more, layout)
        with pytest.raises(WireError):
            decode(forge(layout, data[HEADER_BYTES:] + more), layout)


@pytest.mark.parametrize("name", NAMES)
def test_every_single_flipped_bit_is_noticed(name):
    message, layout = example(name)
    data = encode(message, layout, 5)
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(WireError):
            decode(bytes(damaged), layout)


def accepted_or_refused(data: bytes, layout: Layout) -> bool:
    """Whether `data` is a message: then it is exactly what encoding its content gives. Only WireError says no."""
    try:
        message = decode(data, layout)
    except WireError:
        return False
    assert all(bool(leaf.isfinite().all()) for _, leaf in leaves(message))
    assert encode(message, layout, struct.unpack_from("<I", data, 16)[0]) == data
    return True


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused(name, data):
    assert not accepted_or_refused(data, LAYOUTS[name](torch.float32))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=80, deadline=None)
@given(body=st.binary(max_size=300))
def test_random_bytes_after_a_valid_header_are_refused_or_decoded(name, body):
    layout = LAYOUTS[name](torch.float32)
    accepted_or_refused(forge(layout, body), layout)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dense"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_random_gates_with_matching_random_values_are_decoded(name, data):
    """The lengths must agree with what the gates leave, counted by hand; values may be any finite ones."""
    layout = LAYOUTS[name](torch.float32)
    bits = data.draw(st.lists(st.booleans(), min_size=layout.gate_count, max_size=layout.gate_count))
    gates = make_message(name, layout, bits, np.zeros(sizes(layout)[1], np.float32))["gates"]
    count = sum(int(mask.sum()) for section in survivors(name, gates).values() for mask in section.values())
    off = data.draw(st.sampled_from([-2, -1, 0, 0, 1, 2]))
    raw = data.draw(st.binary(min_size=4 * (count + off), max_size=4 * (count + off)))
    finite = bool(np.isfinite(np.frombuffer(raw, "<f4")).all())
    body = np.packbits(bits).tobytes() + raw
    assert accepted_or_refused(forge(layout, body), layout) == (off == 0 and finite)


# ---------------------------------------------------------------------- foreign messages


def other_layouts() -> dict[str, Layout]:
    renamed = {f"x{key}": shape for key, shape in SHAPES.items()}
    turned = {**SHAPES, "4.weight": (6, 8)}
    swapped = dict(reversed(list(SHAPES.items())))
    return {
        "other names": Layout({"weights": Section(renamed)}),
        "other shapes, as many numbers": Layout({"weights": Section(turned)}),
        "another order": Layout({"weights": Section(swapped)}),
        "another section": Layout({"control": Section(SHAPES)}),
        "a section more": Layout({"weights": Section(SHAPES), "control": Section(SHAPES)}),
        "another precision": dense_layout(torch.float64),
        "gates": gated_layout(UNITS),
        "a logistic regression": Layout({"weights": Section({"fc.weight": (10, 784), "fc.bias": (10,)})}),
    }


@pytest.mark.parametrize("other", other_layouts())
def test_a_message_for_another_model_is_refused(other):
    message, layout = example("dense")
    with pytest.raises(WireError, match="another model"):
        decode(encode(message, layout), other_layouts()[other])


def test_a_message_of_the_other_direction_is_refused():
    down, up = gated_layout(UNITS, thresholds=True), gated_layout(UNITS)
    message, _ = example("units and thresholds")
    with pytest.raises(WireError, match="direction"):
        decode(encode(message, down), up)
    with pytest.raises(WireError, match="direction"):
        decode(encode(message, up), down)


def test_a_message_of_another_round_is_refused_when_the_round_is_known():
    message, layout = example("units")
    data = encode(message, layout, 12)
    with pytest.raises(WireError, match=r"round 12, expected 13"):
        decode(data, layout, 13)
    assert decode(data, layout, 12)
    assert decode(data, layout)


def test_unknown_versions_magic_and_spare_bytes_are_refused():
    message, layout = example("units")
    body = encode(message, layout)[HEADER_BYTES:]
    for version in (0, 2, 255):
        with pytest.raises(WireError, match=f"version {version}"):
            decode(forge(layout, body, version=version), layout)
    with pytest.raises(WireError, match="not a fedprior message"):
        decode(forge(layout, body, magic=b"FEDQ"), layout)
    for spare in (b"\1\0", b"\0\1"):
        with pytest.raises(WireError, match="header bytes"):
            decode(forge(layout, body, spare=spare), layout)


@pytest.mark.parametrize("bit", range(5))
def test_gates_that_the_model_does_not_have_are_refused(bit):
    """Eleven gates leave five bits of padding."""
    message, layout = example("units")
    body = bytearray(encode(message, layout)[HEADER_BYTES:])
    body[1] |= 1 << bit
    with pytest.raises(WireError, match="does not have"):
        decode(forge(layout, bytes(body)), layout)


# ---------------------------------------------------------------------- numbers that are not finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_finite_are_refused_on_both_ends(name, dtype, bad):
    message, layout = example(name, dtype)
    data = encode(message, layout)
    last = list(message["weights"])[-1]
    spoiled = {**message, "weights": {**message["weights"], last: torch.full_like(message["weights"][last], bad)}}
    with pytest.raises(WireError, match="not finite"):
        encode(spoiled, layout)
    packed = struct.pack("<f" if dtype == torch.float32 else "<d", bad)
    with pytest.raises(WireError, match="not finite"):
        decode(forge(layout, data[HEADER_BYTES : -len(packed)] + packed), layout)


def test_a_number_too_large_for_the_layouts_precision_is_refused():
    message, layout = example("dense")
    large = {key: torch.full_like(value, 1e300, dtype=torch.float64) for key, value in message["weights"].items()}
    with pytest.raises(WireError, match="not finite"):
        encode({"weights": large}, layout)


def test_a_tensor_of_another_shape_is_not_encoded():
    message, layout = example("dense")
    with pytest.raises(WireError, match=r"weights/4.bias.*\(2, 4\).*\(8,\)"):
        encode({"weights": {**message["weights"], "4.bias": torch.zeros(2, 4)}}, layout)


# ---------------------------------------------------------------------- memory


class Allocations(TorchDispatchMode):
    """Adds up the memory of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        for part in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(part, Tensor) and part.untyped_storage().data_ptr() not in old:
                self.total += part.untyped_storage().nbytes()
        return out


def memory_of_refusal(data: bytes, layout: Layout) -> int:
    """Bytes that NumPy held at most plus all that torch made until `data` was refused."""
    with Allocations():  # the first use imports a large part of torch
        torch.ones(1)
    tracemalloc.start()
    try:
        with Allocations() as made, pytest.raises(WireError):
            decode(data, layout)
        return tracemalloc.get_traced_memory()[1] + made.total
    finally:
        tracemalloc.stop()


def test_the_memory_meter_of_these_tests_works():
    with Allocations() as made:
        torch.ones(1000) + torch.ones(1000)
    assert made.total >= 12_000


def test_a_tiny_message_for_a_terabyte_model_is_refused_without_allocating():
    dense = Layout({"weights": Section({"w": (10**6, 10**6)})})
    gates = Layout({"weights": Section({"w": (10**6, 10**6)}, dict)}, {"w": (10**6, 10**6)})
    for layout in (dense, gates):
        for body in (b"", b"\0" * 4, b"\xff" * 1000):
            assert memory_of_refusal(forge(layout, body), layout) < 200_000


def test_a_huge_message_for_a_tiny_model_is_refused_without_a_copy():
    for name in NAMES:
        layout = LAYOUTS[name](torch.float32)
        data = forge(layout, bytes(20_000_000))
        assert memory_of_refusal(data, layout) < 200_000


def test_gates_without_values_make_the_receiver_allocate_no_values():
    """A bitmap that promises all of LeNet-5: refused after its masks are known, before the weights have memory."""
    gating = UnitGating(find_structure(LeNet5(3, 32, 10), torch.randn(3, 32, 32)))
    layout = gated_layout(gating)
    model = 4 * 878_538
    for bitmap in (b"\xff" * 76, b"\0" * 76):
        assert memory_of_refusal(forge(layout, bitmap + b"\0" * 8), layout) < 1.5 * model
