"""Options of a factory: read from its signature, converted from text or TOML, refused with the nearest name."""

import tomllib
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprior.core.errors import SettingError
from fedprior.core.optimisers import Optimiser
from fedprior.core.options import Group, Option, call, convert, nearest, options_of, plain, resolve

SGD = Optimiser("SGD", {"lr": 0.1})


def factory(
    network: object,
    positional: int = 3,
    *,
    count: int = 1,
    rate: float = 0.5,
    open_gates: bool = False,
    name: str = "auto",
    limit: int | None = None,
    layers: tuple[str, ...] = (),
    optimiser: Optimiser = SGD,
    server: Optimiser | None = None,
) -> None:
    """A factory with an option of every kind."""


def one(kind: Any, value: Any) -> Any:
    return convert(Option("x", kind, None), value)


def test_options_are_the_keyword_only_parameters():
    options = options_of(factory)
    assert list(options) == ["count", "rate", "open_gates", "name", "limit", "layers", "optimiser", "server"]
    assert options["rate"] == Option("rate", float, 0.5)
    assert options["limit"] == Option("limit", int | None, None)


@dataclass(frozen=True, kw_only=True)
class Shared(Group):
    rate: float = 0.5
    layers: tuple[str, ...] = ()


def with_group(first: int, *, count: int = 1, shared: Shared = Shared(rate=0.25)) -> tuple[int, int, Shared]:
    return first, count, shared


def test_the_fields_of_a_group_are_options_with_the_factorys_own_defaults():
    assert {name: option.default for name, option in options_of(with_group).items()} == {
        "count": 1,
        "rate": 0.25,
        "layers": (),
    }
    chosen = resolve(with_group, {"layers": "a,b"}, "a factory")
    assert call(with_group, 7, options=chosen) == (7, 1, Shared(rate=0.25, layers=("a", "b")))
    assert call(with_group, 7, options={"count": 2}) == (7, 2, Shared(rate=0.25))
    with pytest.raises(SettingError, match="did you mean 'rate'"):
        resolve(with_group, {"rat": 1}, "a factory")


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, "12", 12),
        (int, "-3", -3),
        (int, 12, 12),
        (float, "1e-4", 1e-4),
        (float, 3, 3.0),
        (bool, "true", True),
        (bool, "False", False),
        (bool, True, True),
        (str, "auto", "auto"),
        (str, 5, "5"),
        (int | None, "none", None),
        (int | None, None, None),
        (int | None, "7", 7),
        (tuple[str, ...], "conv1,fc1", ("conv1", "fc1")),
        (tuple[str, ...], "conv1, fc1,", ("conv1", "fc1")),
        (tuple[str, ...], "", ()),
        (tuple[str, ...], ["conv1"], ("conv1",)),
        (Optimiser, "SGD(lr=0.1)", SGD),
        (Optimiser, SGD, SGD),
        (Optimiser | None, "none", None),
        (Optimiser | None, "SGD(lr=0.1)", SGD),
    ],
)
def test_values_are_converted_to_the_options_type(kind, value, expected):
    found = one(kind, value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, "1.5"),
        (int, 1.5),
        (int, "many"),
        (int, True),
        (int, None),
        (float, "fast"),
        (float, "nan"),
        (float, "inf"),
        (float, 10**400),
        (float, float("nan")),
        (float, True),
        (float, None),
        (float, [1.0]),
        (bool, "yes"),
        (bool, "1"),
        (bool, 1),
        (int | None, "never"),
        (tuple[str, ...], 5),
        (Optimiser, "SGD(lr=fast)"),
        (Optimiser, "Adamm(lr=0.1)"),
        (Optimiser, 0.1),
        (Optimiser, None),
    ],
)
def test_values_of_another_kind_are_refused(kind, value):
    with pytest.raises(SettingError):
        one(kind, value)


def test_a_refusal_names_the_option_its_kind_and_the_value():
    with pytest.raises(SettingError, match=r"^count must be a whole number, got 'many'$"):
        convert(Option("count", int, 1), "many")
    with pytest.raises(SettingError, match=r"^limit must be a whole number or none, got 'x'$"):
        convert(Option("limit", int | None, None), "x")


@settings(max_examples=100, deadline=None)
@given(value=st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.text(), st.none()))
def test_conversion_fails_with_a_setting_error_only(value):
    for kind in (int, float, bool, int | None, tuple[str, ...], Optimiser, Optimiser | None):
        try:
            found = one(kind, value)
        except SettingError:
            continue
        assert found is None or isinstance(found, (int, float, bool, tuple, Optimiser))


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(-(2**63), 2**63 - 1),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
    limit=st.none() | st.integers(0, 100),
    layers=st.lists(st.sampled_from(["conv1", "fc1", "blocks.0.conv1"])),
)
def test_settings_survive_being_written_as_toml_values_and_as_text(count, rate, flag, limit, layers):
    given_ = {
        "count": count,
        "rate": rate,
        "open_gates": flag,
        "limit": limit,
        "layers": tuple(layers),
        "optimiser": Optimiser("Adam", {"lr": 0.25, "betas": (0.5, 0.75)}),
        "server": None,
    }
    chosen = resolve(factory, given_, "a factory")
    assert {name: chosen[name] for name in given_} == given_
    written = {name: plain(value) for name, value in chosen.items()}
    assert all(isinstance(value, (bool, int, float, str, list)) for value in written.values())
    assert resolve(factory, written, "a factory") == chosen
    as_text = {name: ",".join(v) if isinstance(v, list) else str(v) for name, v in written.items()}
    assert resolve(factory, as_text, "a factory") == chosen


def test_plain_values_are_valid_toml():
    written = {name: plain(option.default) for name, option in options_of(factory).items()}
    lines = [f"{name} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for name, v in written.items()]
    assert resolve(factory, tomllib.loads("\n".join(lines)), "a factory") == resolve(factory, {}, "a factory")


def test_options_not_given_keep_their_default():
    chosen = resolve(factory, {"rate": "0.25"}, "a factory")
    assert chosen["rate"] == 0.25
    assert chosen["optimiser"] is SGD
    assert chosen["count"] == 1
    assert "positional" not in chosen


@pytest.mark.parametrize(("name", "hint"), [("cuont", "count"), ("open_gate", "open_gates"), ("Layers", "layers")])
def test_a_misspelt_name_suggests_the_nearest(name, hint):
    with pytest.raises(SettingError, match=rf"unknown setting of a factory '{name}'; did you mean '{hint}'\?"):
        resolve(factory, {name: "1"}, "a factory")


@pytest.mark.parametrize("name", ["network", "positional"])
def test_positional_parameters_are_not_options(name):
    with pytest.raises(SettingError, match="unknown"):
        resolve(factory, {name: 1}, "a factory")


def test_a_name_close_to_none_lists_all():
    error = nearest("zzzzzz", ["fedavg", "fedprox"], "algorithm")
    assert str(error) == "unknown algorithm 'zzzzzz'; there are fedavg, fedprox"
    assert isinstance(error, SettingError)
