"""Settings as data: read off the keyword parameters of a factory, or the fields of a dataclass, each with its `About`.

Each setting is described once, beside its type and default. The command line's lists, a run's config, the comparison of
two runs, the report and the tables of the documentation are derived from it. So are the refusals: of a value out of
range, and of a setting that has no effect.

>>> Rate = typing.Annotated[float, About("how often a unit is left out", least=0, below=1)]
>>> def factory(network, *, rate: Rate = 0.5): ...
>>> resolve(factory, {"rate": "0.25"}, "a factory")
{'rate': 0.25}
"""

import difflib
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, TypeVar

from fedprior.core.errors import SettingError

Made = TypeVar("Made")


def _acts(chosen: Any) -> str:
    return ""


@dataclass(frozen=True)
class About:
    """What a setting is, in a sentence; which values it may have; and what it concerns."""

    what: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    unsaid: str = ""
    """What none stands for, if it is the default."""
    machine: bool = False
    """Whether it says where and how a run is computed, not what: runs that differ only in it are the same run."""
    simulated: bool = False
    """Whether only the simulator has it, not a deployment."""
    extends: bool = False
    """Whether it may change when a run is resumed."""
    idle: Callable[[Any], str] = _acts
    """Why it has no effect with the other settings, which are the argument's attributes; empty if it has one."""

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that is not allowed; none always is."""
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise SettingError(f"{name} must be {either(self.choices)}, got {value!r}")
        low = "" if self.least is None else f"at least {self.least}"
        low = low if self.above is None else f"above {self.above}"
        high = "" if self.most is None else f"at most {self.most}"
        high = high if self.below is None else f"below {self.below}"
        below = (self.least is not None and not value >= self.least) or (self.above is not None and value <= self.above)
        above = (self.most is not None and not value <= self.most) or (self.below is not None and value >= self.below)
        if below or above:
            raise SettingError(f"{name} must be {' and '.join(part for part in (low, high) if part)}, got {value}")


@dataclass(frozen=True)
class Option:
    """One setting: a keyword parameter of a factory, or a field."""

    name: str
    kind: Any
    default: Any
    about: About = About()

    @classmethod
    def of(cls, name: str, annotation: Any, default: Any) -> "Option":
        """The option of a parameter, whose annotation may have an `About`."""
        if typing.get_origin(annotation) is not typing.Annotated:
            return cls(name, annotation, default)
        kind, *more = typing.get_args(annotation)
        return cls(name, kind, default, next((one for one in more if isinstance(one, About)), About()))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings that several factories share, as fields. A parameter whose default is a group stands for all of them."""


def options_of(factory: Callable[..., Any]) -> dict[str, Option]:
    """The keyword-only parameters of a factory or dataclass, and the fields of its groups."""
    found: dict[str, Option] = {}
    for p in inspect.signature(factory).parameters.values():
        if isinstance(p.default, Group):
            shared = options_of(type(p.default)).items()
            found |= {name: replace(option, default=getattr(p.default, name)) for name, option in shared}
        elif p.kind is p.KEYWORD_ONLY:
            found[p.name] = Option.of(p.name, p.annotation, p.default)
    return found


def call(factory: Callable[..., Made], *arguments: Any, options: Mapping[str, Any]) -> Made:
    """What the factory makes with these options; it receives those of a group as the group."""
    values = dict(options)
    for p in inspect.signature(factory).parameters.values():
        if isinstance(p.default, Group):
            own = {one.name: values.pop(one.name) for one in fields(p.default) if one.name in values}
            values[p.name] = replace(p.default, **own)
    return factory(*arguments, **values)


def nearest(name: str, known: Iterable[str], what: str) -> SettingError:
    """The error for an unknown name, with a suggestion if a known one is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
    return SettingError(f"unknown {what} {name!r}; {hint}")


def either(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def convert(option: Option, value: Any) -> Any:
    """A value of the option's type and in its range, from text or from a TOML value."""
    try:
        found = _convert(option.kind, value)
    except (ValueError, TypeError, OverflowError) as error:
        raise SettingError(f"{option.name} must be {_named(option.kind)}, got {value!r}") from error
    option.about.check(option.name, found)
    return found


def _named(kind: Any) -> str:
    """A type in words: `a whole number` or, for one that may be absent, `a whole number or none`."""
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    if type(None) in typing.get_args(kind):
        return f"{_named(parts[0])} or none"
    return WORDS.get(kind) or str(getattr(kind, "__name__", kind))


def _convert(kind: Any, value: Any) -> Any:
    if type(None) in typing.get_args(kind):
        if value is None or value == "none":
            return None
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
    if hasattr(kind, "parse"):
        return kind.parse(value) if isinstance(value, str) else _checked(value, kind)
    return CONVERSIONS.get(kind, str)(value)


def _bool(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return bool(_checked(value, bool))


def _int(value: Any) -> int:
    return int(value if isinstance(value, str) else _checked(value, int))


def _float(value: Any) -> float:
    if not math.isfinite(number := float(value)) or isinstance(value, bool):
        raise ValueError(value)
    return number


def _names(value: Any) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else tuple(value)


WORDS: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number"}
CONVERSIONS: dict[Any, Callable[[Any], Any]] = {bool: _bool, int: _int, float: _float, tuple[str, ...]: _names}


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(value)
    return value


def plain(value: Any) -> Any:
    """An option's value as TOML can hold it."""
    if value is None or hasattr(value, "parse"):
        return str(value).lower() if value is None else str(value)
    return list(value) if isinstance(value, tuple) else value


def as_table(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a table of a run's config holds them."""
    return {name: plain(value) for name, value in values.items()}


def listed(known: Mapping[str, Option], defaults: Mapping[str, Any]) -> str:
    """Settings with their defaults, on one line: `rate=0.5, limit=none (10)`."""
    unsaid = {name: f" ({option.about.unsaid})" for name, option in known.items() if option.about.unsaid}
    return ", ".join(f"{name}={plain(value)}{unsaid.get(name, '')}" for name, value in defaults.items())


def described(known: Mapping[str, Option], defaults: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """For each setting its name, its default and what it is, as a table says it."""
    rows = []
    for name, option in known.items():
        about, default = option.about, as_text(defaults[name])
        said = all(choice in about.what for choice in about.choices)
        what = about.what if said else f"{about.what}: {either(about.choices)}"
        rows.append((name, f"{default} ({about.unsaid})" if about.unsaid and default == "none" else default, what))
    return rows


def resolve(factory: Callable[..., Any], given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Every option of the factory, given or default."""
    known = options_of(factory)
    for name in given:
        if name not in known:
            raise nearest(name, known, f"setting of {what}")
    return {name: convert(option, given[name]) if name in given else option.default for name, option in known.items()}


def check_effect(known: Mapping[str, Option], values: Mapping[str, Any], **beside: Any) -> None:
    """Refuse a setting that is not at its default and has no effect; `beside` is what else `idle` looks at.

    A setting of the machine may have no effect, because configs move from one machine to another.
    """
    chosen = SimpleNamespace(**values, **beside)
    for name, option in known.items():
        if values[name] != option.default and not option.about.machine and (why := option.about.idle(chosen)):
            raise SettingError(f"{name}={as_text(values[name])} has no effect: {why}")


def as_text(value: Any) -> str:
    """A value as `--set` reads it."""
    if isinstance(value := plain(value), list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
