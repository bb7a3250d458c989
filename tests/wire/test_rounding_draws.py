"""What rounding must get right beside its mean: draws of their own, the last level, what no difference is taken of."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedprior.core import keys
from fedprior.wire import Layout, Section, quantise, restore

MANY = 4096


def independent(one: Tensor, other: Tensor) -> bool:
    """Two streams of even coins agree half of the time; five standard errors."""
    share = float((one == other).double().mean())
    return abs(share - 0.5) < 5 * 0.5 / len(one) ** 0.5


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8", "int4"])
def test_every_number_has_its_own_rounding_draw(precision: str) -> None:
    """All tensors hold the same number, half way between two neighbours, so that each draw is a coin."""
    half = {"float16": 1 + 2.0**-11, "bfloat16": 1 + 2.0**-8, "int8": 0.5, "int4": 0.5}[precision]
    whole = precision.startswith("int")
    shape = (2, MANY)
    layout = Layout({name: Section({"u": shape, "v": shape}) for name in ("weights", "control")}, precision=precision)
    tensor = torch.full(shape, half)
    tensor[:, 0] = {"int8": 127.0, "int4": 7.0}.get(precision, half)  # a scale of one
    message = {name: {"u": tensor, "v": tensor} for name in layout.sections}
    coded = quantise(message, layout, None, keys.key(3))
    if whole:
        assert all(scale.eq(1).all() for scale in coded["weights.scales"].values())
    streams = [coded[name][part][row, 1:] > (0 if whole else 1) for name in message for part in "uv" for row in (0, 1)]
    for i, one in enumerate(streams):
        assert abs(float(one.double().mean()) - 0.5) < 5 * 0.5 / MANY**0.5
        # Neighbours as well: one draw for a whole tensor would be no coin at all.
        assert independent(one[1:], one[:-1])
        for other in streams[:i]:
            assert independent(one, other)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_stochastic_rounding_never_exceeds_the_last_level(sign: float) -> None:
    """x / (x / 127) can be a little more than 127; one draw in a hundred thousand would then be 128, which is −128."""
    candidates = torch.linspace(1, 2, 10_000)
    over = candidates[candidates / (candidates / 127) > 127]
    assert len(over)
    layout = Layout({"weights": Section({"w": (1, 2**21)})}, precision="int8")
    message = {"weights": {"w": sign * torch.full((1, 2**21), float(over[0]))}}
    for seed in range(3):
        codes = quantise(message, layout, None, keys.key(seed))["weights"]["w"]
        assert codes.unique().tolist() == [int(sign * 127)]


def test_what_gates_remove_is_zero_at_the_receiver() -> None:
    """The receiver adds a difference to what it has, but only where a difference was sent."""
    layout = Layout({"weights": Section({"w": (2, 2)}, dict)}, {"w": (2, 2)}, precision="int8")
    gates = {"w": torch.tensor([[1.0, 0], [0, 1]])}
    packet = {"weights": {"w": torch.full((2, 2), 3.0)}}
    coded = quantise({"gates": gates, "weights": {"w": 4 * gates["w"]}}, layout, packet)
    assert restore(coded, layout, packet)["weights"]["w"].tolist() == [[4.0, 0.0], [0.0, 4.0]]


def test_a_section_without_differences_is_decoded_as_sent() -> None:
    """Control variates have the name of the packet's, and nothing to do with them."""
    sections = {"weights": Section({"w": (1, 2)}), "control": Section({"w": (1, 2)}, relative=False)}
    layout = Layout(sections, precision="int8")
    packet = {name: {"w": torch.tensor([[10.0, 10.0]])} for name in sections}
    message = {"weights": {"w": torch.tensor([[137.0, 10.0]])}, "control": {"w": torch.tensor([[127.0, 0.0]])}}
    coded = quantise(message, layout, packet)
    assert [coded[name]["w"].tolist() for name in sections] == [[[127, 0]], [[127, 0]]]
    heard = restore(coded, layout, packet)
    for name, values in message.items():
        assert torch.equal(heard[name]["w"], values["w"])


def test_small_numbers_are_rounded_to_float16_values() -> None:
    """Below 2^-14 its steps are all 2^-24: one and a quarter of a step becomes one or two, and is right on average."""
    step = 2.0**-24
    layout = Layout({"weights": Section({"w": (MANY,)})}, precision="float16")
    coded = quantise({"weights": {"w": torch.full((MANY,), 1.25 * step)}}, layout, None, keys.key(1))["weights"]["w"]
    steps = coded.double() / step
    assert set(steps.unique().tolist()) == {1.0, 2.0}
    assert abs(float(steps.mean()) - 1.25) < 5 * (0.25 * 0.75 / MANY) ** 0.5


def test_scales_of_tiny_numbers_are_zero() -> None:
    """Of numbers next to nothing the scale would be a multiple of the smallest number there is, and tell lies."""
    tiny = torch.finfo(torch.float32).tiny
    for largest, sent in ((0.5 * tiny, False), (100 * tiny, False), (128 * tiny, True)):
        layout = Layout({"weights": Section({"w": (1, 3)})}, precision="int8")
        coded = quantise({"weights": {"w": torch.tensor([[largest, -largest, 0.0]])}}, layout)
        assert bool(coded["weights.scales"]["w"].any()) == sent
        assert bool(coded["weights"]["w"].any()) == sent


def test_numbers_sent_in_float32_keep_every_bit() -> None:
    """Numbers that travel as they are keep every bit, key or no key."""
    layout = Layout({"weights": Section({"w": (64,)})}, precision="float32")
    value = torch.randn(64, generator=torch.Generator().manual_seed(0))
    coded = quantise({"weights": {"w": value}}, layout, None, keys.key(0))
    assert torch.equal(coded["weights"]["w"], value)
    assert torch.equal(restore(coded, replace(layout))["weights"]["w"], value)
