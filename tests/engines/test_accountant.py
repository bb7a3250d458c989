"""What privacy costs: ε against closed forms, published bounds and the package called directly; and the budget."""

import math
import time

import pytest

from fedprior.core.errors import SettingError
from fedprior.core.settings import Settings
from fedprior.engines.privacy import Accountant, accountant_of, check_budget, noise_for, with_noise

dp = pytest.importorskip("dp_accounting")
pld = pytest.importorskip("dp_accounting.pld")


def delta_of(epsilon: float, mu: float) -> float:
    """δ of the Gaussian mechanism whose noise is 1/μ sensitivities (Balle and Wang 2018)."""

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return phi(-epsilon / mu + mu / 2) - math.exp(epsilon) * phi(-epsilon / mu - mu / 2)


@pytest.mark.parametrize(("noise", "rounds", "delta"), [(5.0, 1, 1e-5), (10.0, 100, 1e-6), (2.0, 4, 1e-3)])
def test_without_sampling_it_is_the_gaussian_mechanism(noise: float, rounds: int, delta: float) -> None:
    """T rounds with noise z are one with noise z / √T."""
    found = Accountant(1.0, noise, delta).total(rounds)
    exact = delta_of(found, math.sqrt(rounds) / noise)
    assert exact <= delta
    assert exact > delta_of(found * 1.002, math.sqrt(rounds) / noise)
    assert delta_of(found * 0.995, math.sqrt(rounds) / noise) > delta


CASES = [(0.01, 4.0, 10_000, 1e-5), (256 / 60_000, 1.1, 14_100, 1e-5), (0.01, 0.76, 1000, 1e-6), (0.2, 1.5, 60, 1e-5)]


@pytest.mark.parametrize(("rate", "noise", "rounds", "delta"), CASES)
def test_it_is_what_the_package_says(rate: float, noise: float, rounds: int, delta: float) -> None:
    """pfl-research's `PLDPrivacyAccountant` is the same call of the package."""
    one = pld.privacy_loss_distribution.from_gaussian_mechanism(noise, sampling_prob=rate)
    direct = one.self_compose(rounds).get_epsilon_for_delta(delta)
    found = Accountant(rate, noise, delta).total(rounds)
    assert direct - 1e-6 <= found <= 1.001 * direct + 1e-6


@pytest.mark.parametrize(
    ("rate", "noise", "rounds", "published"),
    [
        (0.01, 4.0, 10_000, 1.26),  # Abadi et al. 2016, section 3.2
        (256 / 60_000, 1.1, 14_062, 3.01),  # the tutorial of TensorFlow Privacy, 60 epochs of MNIST
    ],
)
def test_it_is_below_published_bounds_which_the_package_gives_as_well(
    rate: float, noise: float, rounds: int, published: float
) -> None:
    """The moments accountant is what both were computed with: the least of RDP(α) + log(1/δ) / (α − 1)."""
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 65))
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
    moments = dp.rdp.RdpAccountant(orders).compose(event, rounds)
    classic = min(rdp + math.log(1e5) / (a - 1) for a, rdp in zip(moments._orders, moments._rdp, strict=True))
    assert classic == pytest.approx(published, abs=0.01)
    assert 0.7 * published < Accountant(rate, noise, 1e-5).total(rounds) < published


def test_more_rounds_cost_more_and_none_nothing() -> None:
    accountant = Accountant(0.1, 1.0, 1e-5)
    costs = [accountant.total(rounds) for rounds in range(6)]
    assert costs[0] == 0
    assert costs == sorted(costs)
    assert [accountant.most(costs[3], 5), accountant.most(0.99 * costs[3], 5), accountant.most(1e9, 5)] == [3, 2, 5]
    assert Accountant(0.1, 0.0, 1e-5).total(1) == math.inf, "without noise nothing is private"


@pytest.mark.parametrize(
    ("budget", "rate", "rounds"), [(8.0, 0.1, 40), (1.0, 0.01, 200), (0.2, 0.05, 10), (30.0, 0.5, 2)]
)
def test_the_noise_for_a_budget_spends_nearly_all_of_it(budget: float, rate: float, rounds: int) -> None:
    noise = noise_for(budget, rate, rounds, 1e-5)
    assert 0.995 * budget < Accountant(rate, noise, 1e-5).total(rounds) <= budget


@pytest.mark.parametrize("rate", [0.03, 1.0])
@pytest.mark.parametrize("rounds", [1, 3])
def test_the_noise_that_is_found_is_never_too_little(rate: float, rounds: int) -> None:
    """What is found has four digits and passes the check of the run; half a percent less noise would not."""
    clients = 1000
    for budget in (0.3, 8.0, 100.0):
        settings = Settings(epsilon=budget, rounds=rounds, clients_per_round=round(rate * clients))
        found = with_noise(settings, clients)
        check_budget(found, clients)
        noise = found.noise_multiplier
        assert noise is not None
        assert noise == float(f"{noise:.4g}")
        assert Accountant(rate, 0.995 * noise, settings.delta).total(rounds) > budget


def test_noise_is_rounded_up_and_moves_up_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of budgets, with an ε in closed form instead of the package's, which is rounded more coarsely."""

    class Jagged(Accountant):
        """ε is z⁻¹, and a little more for every second noise of four digits."""

        def __init__(self, rate: float, noise: float, delta: float) -> None:
            self.noise = noise

        def total(self, rounds: int) -> float:
            return 1 / self.noise * (1 + 3e-3 * (int(f"{self.noise:.3e}"[4]) % 2))

    monkeypatch.setattr("fedprior.engines.privacy.accountant", Jagged)
    for i in range(300):
        budget = 0.02 * 1.025**i
        noise = noise_for(budget, 0.5, 7, 1e-5)
        assert Jagged(0.5, noise, 1e-5).total(7) <= budget
        assert noise < 1.01 / budget


@pytest.mark.parametrize("delta", [0.011, 0.01, 0.5])
def test_a_delta_that_would_protect_nobody_is_refused(delta: float) -> None:
    for private in ({"epsilon": 8.0}, {"noise_multiplier": 1.0}):
        with pytest.raises(SettingError, match=f"delta must be less than one over .* 1/100 = 0.01, got {delta:g}"):
            with_noise(Settings(delta=delta, clients_per_round=4, **private), 100)
    assert with_noise(Settings(delta=0.0099, noise_multiplier=1.0), 100).private
    assert with_noise(Settings(delta=delta), 100).delta == delta, "a run that is not private has no delta"


def test_a_budget_that_is_none_is_refused() -> None:
    for budget in (100.1, 1e9, math.inf):
        with pytest.raises(SettingError, match="is no privacy: it must be at most 100"):
            with_noise(Settings(epsilon=budget, clients_per_round=5), 50)


@pytest.mark.parametrize("noise", [1e-9, 1e-3, 0.01, 0.05])
def test_little_noise_is_counted_at_once_and_never_too_cheap(noise: float) -> None:
    """Without sampling the loss of T rounds is N(Tμ²/2, Tμ²) with μ = 1/z; of three rounds ε is above its mean."""
    began = time.process_time()
    found = Accountant(1.0, noise, 1e-5).total(3)
    assert time.process_time() - began < 5
    if noise > 1e-3:
        quantile = 4.2649  # of 1 − δ
        exact = 1.5 / noise**2 + quantile * math.sqrt(3) / noise
        assert 0.999 * exact < found < 1.002 * exact
    else:
        assert found > 1.5 / noise**2


def test_a_cohort_larger_than_the_clients_is_not_accounted_for() -> None:
    """`check_run` refuses it in one line, as without privacy."""
    assert with_noise(Settings(epsilon=8.0, clients_per_round=2000), 1000).noise_multiplier is None


def test_a_run_that_says_its_budget_is_told_its_noise() -> None:
    settings = with_noise(Settings(epsilon=4.0, rounds=10, clients_per_round=5), 50)
    assert settings.noise_multiplier == noise_for(4.0, 0.1, 10, 1e-5)
    assert with_noise(settings, 50) is settings
    assert with_noise(Settings(noise_multiplier=2.0), 50).noise_multiplier == 2.0
    assert with_noise(Settings(), 50) == Settings()
    check_budget(settings, 50)


def test_rounds_beyond_the_budget_are_refused() -> None:
    settings = Settings(epsilon=4.0, noise_multiplier=1.0, rounds=500, clients_per_round=5)
    with pytest.raises(
        SettingError, match=r"500 rounds with noise_multiplier=1 spend ε = .*epsilon=4: it allows \d+ rounds"
    ) as caught:
        check_budget(settings, 50)
    allowed = int(str(caught.value).split()[-2])
    check_budget(Settings(epsilon=4.0, noise_multiplier=1.0, rounds=allowed, clients_per_round=5), 50)
    with pytest.raises(SettingError, match=f"allows {allowed} rounds"):
        check_budget(Settings(epsilon=4.0, noise_multiplier=1.0, rounds=allowed + 1, clients_per_round=5), 50)
    with pytest.raises(SettingError, match="allows 0 rounds"):
        check_budget(Settings(epsilon=4.0, noise_multiplier=0.0, rounds=1, clients_per_round=5), 50)


def test_the_rate_is_that_of_a_client() -> None:
    found = accountant_of(Settings(noise_multiplier=1.0, clients_per_round=5, delta=1e-6), 50)
    assert found is not None
    assert found.total(3) == pytest.approx(Accountant(0.1, 1.0, 1e-6).total(3))
    assert accountant_of(Settings(), 50) is None
