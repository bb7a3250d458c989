"""Options by name: read from a factory's keyword parameters, converted from text, checked, with the nearest name."""

import difflib
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedprior.core.errors import SettingError
from fedprior.core.optimisers import Optimiser


@dataclass(frozen=True)
class Option:
    """One keyword parameter of a factory."""

    name: str
    kind: Any
    default: Any


def options_of(factory: Callable[..., Any]) -> dict[str, Option]:
    """The keyword-only parameters of a factory."""
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: Option(p.name, p.annotation, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}


def nearest(name: str, known: Iterable[str], what: str) -> SettingError:
    """The error for an unknown name, with a suggestion where one is near."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
    return SettingError(f"unknown {what} {name!r}; {hint}")


def convert(option: Option, value: Any) -> Any:
    """A value of the option's type, from text or from a TOML value."""
    try:
        return _convert(option.kind, value)
    except (ValueError, TypeError, OverflowError) as error:
        raise SettingError(f"{option.name} must be {_named(option.kind)}, got {value!r}") from error


def _named(kind: Any) -> str:
    """A type in words: `int` or, for one that may be absent, `int or none`."""
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    if type(None) in typing.get_args(kind):
        return f"{_named(parts[0])} or none"
    return str(getattr(kind, "__name__", kind))


def _convert(kind: Any, value: Any) -> Any:
    if type(None) in typing.get_args(kind):
        if value is None or value == "none":
            return None
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
    text = isinstance(value, str)
    if kind is Optimiser:
        return Optimiser.parse(value) if text else _checked(value, Optimiser)
    if kind is bool:
        if text and value.lower() not in ("true", "false"):
            raise ValueError(value)
        return value.lower() == "true" if text else _checked(value, bool)
    if kind is int:
        return int(value) if text else _checked(value, int)
    if kind is float:
        number = float(value)
        if not math.isfinite(number) or isinstance(value, bool):
            raise ValueError(value)
        return number
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if text else tuple(value)
    return str(value)


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(value)
    return value


def plain(value: Any) -> Any:
    """An option's value as TOML can hold it."""
    if value is None or isinstance(value, Optimiser):
        return str(value).lower() if value is None else str(value)
    return list(value) if isinstance(value, tuple) else value


def resolve(factory: Callable[..., Any], given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Every option of the factory, given or default."""
    known = options_of(factory)
    for name in given:
        if name not in known:
            raise nearest(name, known, f"setting of {what}")
    return {name: convert(option, given[name]) if name in given else option.default for name, option in known.items()}
