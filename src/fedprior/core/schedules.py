"""Learning rates that change from round to round: a named schedule multiplies all rates of the clients or the server.

    constant(warmup=0)                1
    linear(end=0.0, warmup=0)         from 1 down to `end`
    cosine(end=0.0, warmup=0)         from 1 down to `end` along half a cosine
    step(every, factor=0.1, warmup=0) times `factor` after every `every` rounds
    exponential(factor, warmup=0)     times `factor` after every round

Each starts with `warmup` rounds in which the rate grows evenly: the first of w rounds has 1/(w + 1). The schedules are
torch's LinearLR, CosineAnnealingLR, StepLR and ExponentialLR, stepped once per round.
"""

import ast
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fedprior.core.errors import SettingError

if TYPE_CHECKING:
    from torch import Tensor

Factor = Callable[[int, int], float]
"""Maps the rounds completed since the warm-up, and the number of rounds after it, to a factor."""


def _constant() -> Factor:
    return lambda over, rounds: 1.0


def _linear(end: float = 0.0) -> Factor:
    _share("end", end)
    return lambda over, rounds: 1 + (end - 1) * over / rounds


def _cosine(end: float = 0.0) -> Factor:
    _share("end", end)
    return lambda over, rounds: end + (1 - end) * (1 + math.cos(math.pi * over / rounds)) / 2


def _step(every: int, factor: float = 0.1) -> Factor:
    _whole("every", every, 1)
    _share("factor", factor, zero=False)
    return lambda over, rounds: factor ** (over // every)


def _exponential(factor: float) -> Factor:
    _share("factor", factor, zero=False)
    return lambda over, rounds: factor**over


KINDS: dict[str, Callable[..., Factor]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "step": _step,
    "exponential": _exponential,
}


USAGE = "constant, linear(end=0), cosine(end=0), step(every=N, factor=0.1), exponential(factor=0.99)"


def _share(name: str, value: Any, zero: bool = True) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1 or (value == 0 and not zero):
        raise SettingError(f"{name} must be {'at least' if zero else 'above'} 0 and at most 1, got {value!r}")


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"{name} must be a whole number of at least {least}, got {value!r}")


class Curve(NamedTuple):
    """A schedule: its factor after the warm-up, and the length of the warm-up."""

    factor: Factor
    warmup: int = 0

    @classmethod
    def parse(cls, text: str) -> "Curve":
        """Read a name or a call: `cosine`, `step(every=100, factor=0.5, warmup=10)`."""
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
            name, given = ast.unparse(call.func), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
            if call.args or name not in KINDS:
                raise ValueError(text)
            warmup = given.pop("warmup", 0)
            inspect.signature(KINDS[name]).bind(**given)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise SettingError(f"a schedule is one of {USAGE}, each with an optional warmup=N; got {text!r}") from error
        _whole("warmup", warmup, 0)
        try:
            return cls(KINDS[name](**given), warmup)
        except SettingError as error:
            raise SettingError(f"{text}: {error}") from error

    def at(self, number: int, rounds: int) -> float:
        """The factor of round `number`, counted from 1, of `rounds` in all."""
        over = number - 1
        if over < self.warmup:
            return (over + 1) / (self.warmup + 1)
        # After the last round, for example when a model is personalised, the last round's rate applies.
        left = max(1, rounds - self.warmup)
        return self.factor(min(over - self.warmup, left - 1), left)


class Rate(NamedTuple):
    """The factors of a round's learning rates."""

    local: "float | Tensor" = 1.0
    server: "float | Tensor" = 1.0


@dataclass(frozen=True)
class Rates:
    """Both schedules of a run, as text, and the number of rounds that they cover."""

    local: str = "constant"
    server: str = "constant"
    rounds: int = 1

    def __post_init__(self) -> None:
        for text in (self.local, self.server):
            Curve.parse(text)

    @property
    def constant(self) -> bool:
        """Whether the rates never change."""
        return self.local == self.server == "constant"

    def at(self, number: int) -> Rate:
        """The factors of a round."""
        return Rate(*(Curve.parse(text).at(number, self.rounds) for text in (self.local, self.server)))
