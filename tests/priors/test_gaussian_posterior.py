"""The Gaussian posterior: against Bayesian linear regression, a product of Gaussians, and draws counted by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

import fedprior
from fedprior import wire
from fedprior.core import keys
from fedprior.core.errors import SettingError
from fedprior.core.keys import Purpose, Turn
from fedprior.em import Batch, e_step
from fedprior.engines.attack import ATTACKS
from fedprior.priors import Assignment, GaussianPosterior
from fedprior.priors.base import NONE

D = torch.float64
N, DECAY = 500.0, 0.05
SETTINGS = {"examples": N, "decay": DECAY, "curvature": 0.4}


def regression(size=40):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(size, 3, generator=draw, dtype=D) * torch.tensor([0.5, 1.0, 2.0], dtype=D)
    return x, x @ torch.tensor([1.0, -2.0, 0.5], dtype=D) + 0.3 + 0.1 * torch.randn(size, generator=draw, dtype=D)


def network():
    torch.manual_seed(0)
    return fedprior.Network(
        nn.Linear(3, 1).double(), torch.zeros(3, dtype=D), loss=lambda out, y: (out[:, 0] - y).square() / 2
    )


class Repeated(list):
    """The same batch at every step."""

    def __init__(self, batch, steps):
        self.batch, self.steps = batch, steps

    def __len__(self):
        return self.steps

    def __getitem__(self, step):
        return self.batch


def learn(clients, steps, factors=NONE, **settings):
    """The E-step of so many clients that have the same data and other draws."""
    model, (x, y) = network(), regression()
    chosen = fedprior.algorithm("fedgauss", model, **SETTINGS, **settings)
    server = chosen.init(model.params())
    server = {**server, "precision": {k: v * factors.get(k, 1.0) for k, v in server["precision"].items()}}
    packet = {s: {k: v.expand(clients, *v.shape) for k, v in server[s].items()} for s in server}
    batch = Batch(x.expand(clients, *x.shape), y.expand(clients, *y.shape), None, None)
    turn = Turn(keys.key(3).expand(clients), 1, torch.arange(clients))
    step = e_step(chosen, model, packet, Repeated(batch, steps), turn, {}, vectorised=True)
    return chosen, server, turn, step.upload


def test_the_e_step_finds_the_posterior_of_a_linear_regression():
    """Of all diagonal Gaussians, the nearest has the exact mean and the diagonal of the exact precision."""
    rates = {"local_optimiser": "SGD(lr=0.1)", "local_precision_optimiser": "SGD(lr=0.02)"}
    chosen, server, _, uploads = learn(100, 300, **rates)
    found = chosen.prior.solve(Assignment.of(uploads["weights"], uploads), server)
    x, y = regression()
    x = torch.cat([x, torch.ones(len(x), 1, dtype=D)], 1)
    exact = x.T @ x / len(x) + DECAY * torch.eye(4, dtype=D)
    centre = torch.linalg.solve(exact, x.T @ y / len(x))
    mean, sure = (torch.cat([found[s]["weight"][0], found[s]["bias"]]) for s in ("weights", "precision"))
    torch.testing.assert_close(mean, centre, rtol=0, atol=0.01)
    torch.testing.assert_close(sure, exact.diagonal(), rtol=0.05, atol=0)


def test_one_step_is_the_formula():
    """The gradient at a draw by hand, with its natural steps in mean and log precision, which are clipped."""
    factors = {"weight": 2.0, "bias": 0.5}
    _, server, turn, uploads = learn(
        3, 1, factors, local_optimiser="SGD(lr=0.2)", local_precision_optimiser="SGD(lr=0.3)"
    )
    prior, (x, y) = GaussianPosterior(**SETTINGS), regression()
    start = prior.start
    for client in range(3):
        key = keys.fold(turn.key(Purpose.RELAX)[client], 0)
        drawn = prior.relax(Assignment(server["weights"], precision=server["precision"]), server, key)
        wrong = x @ drawn["weight"][0] + drawn["bias"] - y
        for name, g in (("weight", (wrong[:, None] * x).mean(0)[None]), ("bias", wrong.mean()[None])):
            m = server["weights"][name]
            torch.testing.assert_close(
                uploads["weights"][name][client], m - 0.2 * min(1, 1 / factors[name]) * (g + DECAY * m)
            )
            natural = 1 - DECAY / (start * factors[name]) - N * g * (drawn[name] - m)
            sure = math.log(start * factors[name]) - 0.3 * natural.clamp(-10, 10)
            torch.testing.assert_close(uploads["precision"][name][client], sure.exp())


def some_uploads(clients=4):
    draw = torch.Generator().manual_seed(2)
    weights = {"a": torch.randn(clients, 3, generator=draw, dtype=D)}
    return weights, {"a": 0.1 + torch.rand(clients, 3, generator=draw, dtype=D)}


@pytest.mark.parametrize("counts", [None, (1, 5, 2, 2)])
def test_the_m_step_is_the_product_of_gaussians(counts):
    """A parabola through three points of Σ_s n_s log q_s; and no Gaussian is nearer in Σ_s n_s KL(q ‖ q_s)."""
    weights, sure = some_uploads()
    prior = GaussianPosterior(**SETTINGS)
    server = {"weights": {"a": torch.zeros(3, dtype=D)}, "precision": {"a": torch.ones(3, dtype=D)}}
    weight = None if counts is None else torch.tensor(counts, dtype=D)
    share = torch.tensor(counts or (1, 1, 1, 1), dtype=D)[:, None] / (4 if counts is None else 10)
    found = prior.solve(Assignment(weights, precision=sure), server, weight)
    clients = Normal(weights["a"], (N * sure["a"]).rsqrt())
    below, at, above = (
        (share * clients.log_prob(torch.full((3,), place, dtype=D))).sum(0) for place in (-1.0, 0.0, 1.0)
    )
    precision = 2 * at - below - above
    torch.testing.assert_close(found["precision"]["a"], precision / N)
    torch.testing.assert_close(found["weights"]["a"], (above - below) / (2 * precision))
    m, p = (found[s]["a"].clone().requires_grad_() for s in ("weights", "precision"))
    (share * kl_divergence(Normal(m, (N * p).rsqrt()), clients)).sum().backward()
    torch.testing.assert_close(torch.stack([m.grad, p.grad]), torch.zeros(2, 3, dtype=D), rtol=0, atol=1e-9)


def test_the_slope_is_that_of_the_density_and_one_step_multiplies_near_the_product():
    weights, sure = some_uploads()
    prior = GaussianPosterior(**SETTINGS)
    server = {s: {"a": v["a"].mean(0).requires_grad_()} for s, v in (("weights", weights), ("precision", sure))}
    each = [prior.log_prob(Assignment({"a": weights["a"][s]}, precision={"a": sure["a"][s]}), server) for s in range(4)]
    (-torch.stack(each).mean()).backward()
    slope = prior.slope({"weights": weights, "precision": sure}, server)
    solved = prior.solve(Assignment(weights, precision=sure), server)
    for section in ("weights", "precision"):
        torch.testing.assert_close(slope[section]["a"], server[section]["a"].grad)
        torch.testing.assert_close(server[section]["a"] - slope[section]["a"], solved[section]["a"])


def test_a_negative_precision_from_a_hostile_client_does_not_count():
    weights, sure = some_uploads()
    sure["a"][1] = -3.0
    prior, left = GaussianPosterior(**SETTINGS), [0, 2, 3]
    found = prior.solve(Assignment(weights, precision=sure), {})
    honest = prior.solve(Assignment({"a": weights["a"][left]}, precision={"a": sure["a"][left]}), {})
    torch.testing.assert_close(found["weights"]["a"], honest["weights"]["a"])
    assert (found["precision"]["a"] > 0).all()


@pytest.mark.parametrize(("precision", "width"), [("float32", 8), ("float16", 4), ("int8", 3), ("int4", 2.5)])
def test_precisions_travel_positive_and_are_counted(small_task, precision, width):
    """Beside a weight, four bytes or, where anything is rounded, two."""
    settings = (
        {"rounds": 2, "wire": precision, "entropy": False} if "int" in precision else {"rounds": 2, "wire": precision}
    )
    task = small_task()
    result = fedprior.run(task, "fedgauss", **settings)
    sim = result.simulation
    numbers = sum(value.numel() for value in task.network.params().values())
    messages = 2 * sim.settings.clients_per_round
    least = messages * (wire.HEADER_BYTES + width * numbers)
    for way in ("bytes_up", "bytes_down"):
        assert least <= result.summary[way] <= 1.5 * least
    if "int" not in precision:
        assert result.summary["bytes_up"] == least
    sure = torch.cat([value.reshape(-1) for value in sim.server["precision"].values()])
    assert (sure > 0).all()
    assert sure.unique().numel() > numbers / 4


def test_a_small_precision_survives_rounding_beside_a_large_one(small_task):
    """As a difference from the packet's it would be lost, or negative."""
    network = small_task().network
    chosen = replace(fedprior.algorithm("fedgauss", network), wire=wire.Wire.of("int8"))
    packet = chosen.init(network.params())
    small = {name: torch.full_like(value, 1.2345e-3) for name, value in packet["precision"].items()}
    layout = chosen.uplink(packet)
    coded = wire.quantise({**packet, "precision": small}, layout, packet, keys.key(1))
    heard = wire.restore(wire.decode(wire.encode(coded, layout), layout), layout, packet)
    for value in heard["precision"].values():
        torch.testing.assert_close(value, torch.full_like(value, 1.2345e-3), rtol=0.01, atol=0)


def test_members_of_the_posterior_are_draws_from_it(small_task):
    task = small_task()
    result = fedprior.run(task, fedprior.algorithm("fedgauss", task.network, examples=2000), rounds=1)
    members = fedprior.posterior(result, samples=300).members
    server, first = result.simulation.server, next(iter(task.network.params()))
    drawn = torch.stack([dict(member.named_parameters())[first].detach() for member in members])
    sure = 2000 * server["precision"][first]
    z = ((drawn - server["weights"][first]) * sure.sqrt()).double()
    assert z.square().mean().item() == pytest.approx(1, abs=0.05)
    assert z.mean(0).abs().max() < 5 / math.sqrt(300)
    scores = fedprior.evaluate(result, posterior=fedprior.posterior(result, samples=2))
    assert scores["nll"] != scores["server"]["nll"]


@pytest.mark.parametrize("name", ["examples", "decay", "curvature"])
def test_settings_are_above_zero(small_task, name):
    with pytest.raises(SettingError, match=f"{name} must be above 0"):
        fedprior.algorithm("fedgauss", small_task().network, **{name: 0.0})


def test_draws_that_would_drown_the_weights_are_warned_of():
    assert GaussianPosterior(401.0, 1e-4, 1.0).cautions(5) == []
    (caution,) = GaussianPosterior(100.0, 1e-4, 1.0).cautions(5)
    assert caution.startswith("examples = 100 makes every weight uncertain by 0.1 at the start")
    assert caution.endswith("from 400 on it is 0.05")


@pytest.mark.parametrize("section", ["weights", "log-precision"])
def test_a_client_that_is_far_too_sure_is_left_out_as_one_far_away(section, small_task, monkeypatch):
    """Its precision alone could make the product its own."""

    def shifted(hostile, local, packet):
        far = {name: torch.where(hostile, value + 15.0, value) for name, value in local[section].items()}
        return {**local, section: far}

    monkeypatch.setitem(ATTACKS, "scale", shifted)
    chosen = {"clients_per_round": 6, "rounds": 2, "attack": "scale", "attackers": 0.2}
    for mode in ("in-turn", "vectorised"):
        result = fedprior.run(small_task(), "fedgauss", mode=mode, **chosen)
        faults = [[fault["client"] for fault in record["faults"]] for record in result.records]
        assert faults == [result.simulation.hostile.nonzero().flatten().tolist()] * 2


def test_a_private_run_is_refused(small_task):
    with pytest.raises(SettingError, match="the M-step of GaussianPosterior is not a mean of weights"):
        fedprior.run(small_task(), "fedgauss", noise_multiplier=1.0, clip=1.0)
