"""Differential privacy of a client: what composes with it, how much noise a budget needs, and what rounds have spent.

Two sets of clients are neighbours if one has a client more, with all of its examples. What is private is the server's
model after every round: the noise of `em/guard.py` under Poisson sampling at the rate `clients_per_round` / clients,
composed by privacy loss distributions (package dp-accounting, the extra `privacy`).
"""

import math
from dataclasses import replace
from decimal import ROUND_CEILING, Context
from functools import lru_cache
from typing import Any

from fedprior.core.errors import SettingError
from fedprior.core.network import Network
from fedprior.core.settings import Settings
from fedprior.corrections import Correction
from fedprior.em import Algorithm
from fedprior.em.guard import CROWD, Guard

STEPS = 12
"""How finely privacy losses are counted, as steps in their standard deviation. They are rounded so that ε is never too
small; with a dozen it is too large by less than 0.1%."""
CLOSE = 1e-3
"""How near to the budget the noise that is found for it brings ε, relative."""
FOUR = Context(prec=4, rounding=ROUND_CEILING)
"""The digits of that noise. It is rounded up, because less of it would cost more than the budget."""
NEXT_TO_NOTHING = 1e-3
"""Less noise is counted as none; with this much, ε of a round is about half a million."""
MEANINGLESS = 100.0
"""The largest budget: from ε of about ten on, what is promised says little, and e¹⁰⁰ is no promise at all."""
DEAR = 1.25
"""How many times as much noise uploads may have because the clip adapts, before a run says so."""


# ---------------------------------------------------------------------- what composes
def guard_of(settings: Settings) -> Guard | None:
    """What a run with these settings does to uploads."""
    quantile = settings.clip_quantile
    if settings.private:
        return Guard(settings.largest, settings.noise_multiplier or 0.0, settings.clients_per_round, quantile)
    return None if settings.clip is None else Guard(settings.clip, quantile=quantile)


def check_guard(settings: Settings, algorithm: Algorithm, network: Network) -> None:
    """Refuse to clip what has more parts than weights, and privacy where something would travel outside of it."""
    if settings.private and (why := _outside(settings, algorithm, network)):
        raise SettingError(f"a private run is not possible here: {why}: docs/privacy.md")
    guard = guard_of(settings)
    if guard is not None and not math.isfinite(guard.of_sum):
        raise SettingError(
            f"with clip_quantile, the noise of the count leaves the uploads a budget only if noise_multiplier is below "
            f"clients_per_round / {CROWD // 2} = {2 * guard.of_count:g}, and it is {guard.noise:g}: take more "
            "clients_per_round, fewer rounds, a larger epsilon, or a fixed clip"
        )
    if settings.clip is not None and (why := _not_clipped(algorithm, network)):
        raise SettingError(f"clip is the distance of an upload's weights, but {why}")


def caution(settings: Settings) -> str:
    """What to say of a private run whose clip takes much of its budget to adapt; empty if there is nothing."""
    guard = guard_of(settings)
    if guard is None or guard.of_sum <= DEAR * guard.noise:
        return ""
    return (
        f"with clip_quantile, the noise of uploads is {guard.of_sum:.3g} times the clip instead of {guard.noise:.3g}: "
        f"counting in cohorts of {guard.expected:g} takes much of the budget; give more clients_per_round or fix clip"
    )


def _outside(settings: Settings, algorithm: Algorithm, network: Network) -> str:
    """What depends on clients' data and is not in the clipped sum; empty if nothing does."""
    if exposed := algorithm.prior.exposes():
        return exposed
    if type(algorithm.correction) is not Correction:
        return "the correction sends more than weights, or remembers what it has not sent"
    if network.norms and settings.statistics == "shared":
        return "statistics of norms travel beside the weights; set statistics=local or batch"
    if settings.entropy and any(name in settings.wire.rpartition("/")[2] for name in ("int8", "int4")):
        return "the length of an entropy-coded message depends on data; set entropy=false"
    if settings.patience is not None or settings.keep == "best":
        return "evaluations have no noise, so they must not choose a model; leave out patience and keep"
    if settings.mode not in ("auto", "in-turn"):
        return "a cohort's size is random, and clients train in turn; leave out mode"
    return ""


def _not_clipped(algorithm: Algorithm, network: Network) -> str:
    """Why uploads have no distance from the server's weights; empty if they have one."""
    server = algorithm.init(network.params())
    sections = algorithm.uplink(server).sections.keys() - {"statistics"}
    if sections != {"weights"}:
        return f"here {', '.join(sorted(sections - {'weights'})) or 'no weights'} travel{'s' * (len(sections) < 3)}"
    several = any(value.shape != network.params()[name].shape for name, value in server["weights"].items())
    return "the server has several models" if several else ""


# ---------------------------------------------------------------------- what it costs
class Accountant:
    """ε after any number of rounds."""

    def __init__(self, rate: float, noise: float, delta: float) -> None:
        self.delta = delta
        self.one: Any = _loss(rate, noise) if noise >= NEXT_TO_NOTHING else None
        self.found: dict[int, float] = {}

    def total(self, rounds: int) -> float:
        """ε of this many rounds together."""
        if self.one is None or not rounds:
            return float("inf") if rounds else 0.0
        if rounds not in self.found:
            self.found[rounds] = float(self.one.self_compose(rounds).get_epsilon_for_delta(self.delta))
        return self.found[rounds]

    def most(self, budget: float, rounds: int) -> int:
        """How many of these rounds stay within a budget."""
        low, high = 0, rounds
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.total(middle) <= budget else (low, middle - 1)
        return low


def _loss(rate: float, noise: float) -> Any:
    """The distribution of the privacy loss of one round."""
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise SettingError(
            "a private run needs the package dp-accounting, which says what it costs: pip install 'fedprior[privacy]'"
        ) from error
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=_grid(rate, noise)
    )


def _grid(rate: float, noise: float) -> float:
    """The step for a round, whose loss has a standard deviation of about q √(exp(1/z²) − 1)."""
    spread = rate * math.sqrt(math.expm1(min(1 / noise**2, 50.0)))
    # With little noise the losses are about 1/2z², and steps that do not grow with them would be too many to count.
    return min(max(spread / STEPS, 1e-5), max(1e-3, 5e-5 / noise**2))


@lru_cache(maxsize=16)
def accountant(rate: float, noise: float, delta: float) -> Accountant:
    """The accountant of these settings, which keeps what it has worked out."""
    return Accountant(rate, noise, delta)


def accountant_of(settings: Settings, clients: int) -> Accountant | None:
    """The accountant of a run; None if it is not private."""
    if not settings.private:
        return None
    return accountant(settings.clients_per_round / clients, settings.noise_multiplier or 0.0, settings.delta)


@lru_cache(maxsize=16)
def noise_for(budget: float, rate: float, rounds: int, delta: float) -> float:
    """The least noise with which these rounds stay within a budget, to four digits."""

    def spent(noise: float) -> float:
        return accountant(rate, noise, delta).total(rounds)

    low, high = 0.0, 1.0
    while spent(high) > budget:
        low, high = high, 2 * high
        if high > 1e6:
            raise SettingError(f"no noise brings ε to {budget:g} with delta={delta:g}; give a larger one")
    low = low or high / 2
    while low > 0.05 and spent(low) <= budget:
        low, high = low / 2, low
    while high - low > 1e-4 * high and not budget * (1 - CLOSE) < spent(high) <= budget:
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle) <= budget else (middle, high)
    found = FOUR.create_decimal(repr(high))
    while spent(float(found)) > budget:  # ε as it is counted falls with the noise, but for its rounding
        found = FOUR.next_plus(found)
    return float(found)


def check_promise(settings: Settings, clients: int) -> None:
    """Refuse a privacy that would protect nobody."""
    if not settings.private:
        return
    if settings.epsilon is not None and settings.epsilon > MEANINGLESS:
        raise SettingError(
            f"epsilon={settings.epsilon:g} is no privacy: it must be at most {MEANINGLESS:g}, and is best below ten; "
            "to bound uploads without privacy, give clip"
        )
    if settings.delta >= 1 / clients:
        raise SettingError(
            f"delta must be less than one over the number of clients, 1/{clients} = {1 / clients:.4g}, got "
            f"{settings.delta:g}: a run that shows one client whole would keep that promise"
        )


def with_noise(settings: Settings, clients: int) -> Settings:
    """Settings that say how much noise there is, where they say what it may cost."""
    check_promise(settings, clients)
    if settings.epsilon is None or settings.noise_multiplier is not None:
        return settings
    if settings.clients_per_round > clients:
        return settings  # `check_run` refuses that, private or not
    rate = settings.clients_per_round / clients
    return replace(settings, noise_multiplier=noise_for(settings.epsilon, rate, settings.rounds, settings.delta))


def check_budget(settings: Settings, clients: int) -> None:
    """Refuse rounds that would spend more than the budget."""
    spending = accountant_of(settings, clients)
    if spending is None or settings.epsilon is None:
        return
    if (cost := spending.total(settings.rounds)) > settings.epsilon:
        most = spending.most(settings.epsilon, settings.rounds)
        raise SettingError(
            f"{settings.rounds} rounds with noise_multiplier={settings.noise_multiplier:g} spend ε = {cost:.4g}, "
            f"and the budget is epsilon={settings.epsilon:g}: it allows {most} rounds"
        )
