"""The paper's claims about hard EM, executed. Everything in double precision."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from fedprior.core.optimisers import Optimiser, TreeOptimiser
from fedprior.core.trees import Tree, stack
from fedprior.em import Algorithm, m_step
from fedprior.priors import Assignment, Distance, Gaussian, Laplace, Mixture, Prior, SpikeSlab, StudentT
from fedprior.units import WeightGating

D = torch.float64


def linear_gaussian(clients: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Client s observes y = A_s φ_s + noise of variance 1."""
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, generator=g, dtype=D), torch.randn(4, generator=g, dtype=D)) for _ in range(clients)]


def test_single_step_em_is_gradient_ascent_on_the_marginal_likelihood() -> None:
    """Appendix F: E_posterior[∇_w log p(φ | w)] = ∇_w log p(D | w), on a conjugate model where both are closed."""
    lam, data = 1.7, linear_gaussian(5, 0)
    prior, w = Gaussian(precision=lam), torch.randn(3, dtype=D, generator=torch.Generator().manual_seed(1))

    def log_marginal(w: Tensor) -> Tensor:
        total = torch.zeros((), dtype=D)
        for a, y in data:  # φ integrated out: y ~ N(A w, I + A Aᵀ/λ)
            covariance = torch.eye(4, dtype=D) + a @ a.T / lam
            total = total + torch.distributions.MultivariateNormal(a @ w, covariance).log_prob(y)
        return total / len(data)

    variable = w.clone().requires_grad_()
    log_marginal(variable).backward()

    gradients = []
    for a, y in data:
        mean = torch.linalg.solve(a.T @ a + lam * torch.eye(3, dtype=D), a.T @ y + lam * w)
        # log p is quadratic in φ, so its gradient under the posterior is the gradient at the posterior mean.
        centre = w.clone().requires_grad_()
        prior.log_prob(Assignment({"w": mean}), {"weights": {"w": centre}}).backward()
        assert centre.grad is not None
        gradients.append(lam * centre.grad)  # the library's terms are of unit scale: λ belongs to the step size
    assert variable.grad is not None
    torch.testing.assert_close(torch.stack(gradients).mean(0), variable.grad, rtol=1e-12, atol=1e-12)


def test_monte_carlo_posterior_gives_the_same_gradient() -> None:
    """The same claim with the expectation really taken over posterior samples of φ, not only at its mean."""
    lam, (a, y) = 0.9, linear_gaussian(1, 3)[0]
    prior, w = Gaussian(precision=lam), torch.tensor([0.3, -0.2, 0.8], dtype=D)
    precision = a.T @ a + lam * torch.eye(3, dtype=D)
    posterior = torch.distributions.MultivariateNormal(
        torch.linalg.solve(precision, a.T @ y + lam * w), precision_matrix=precision
    )
    torch.manual_seed(0)
    samples = posterior.sample((200_000,))
    centre = w.clone().requires_grad_()
    torch.func.vmap(lambda phi: prior.log_prob(Assignment({"w": phi}), {"weights": {"w": centre}}))(
        samples
    ).mean().backward()
    marginal = w.clone().requires_grad_()
    covariance = torch.eye(4, dtype=D) + a @ a.T / lam
    torch.distributions.MultivariateNormal(a @ marginal, covariance).log_prob(y).backward()
    assert centre.grad is not None
    assert marginal.grad is not None
    torch.testing.assert_close(lam * centre.grad, marginal.grad, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "prior", [Gaussian(0.8), Laplace(0.3), Mixture(2, 0.8)], ids=["gaussian", "laplace", "mixture"]
)
def test_block_coordinate_hard_em_never_decreases_its_objective(prior: Prior) -> None:
    """Σ_s log p(D_s | φ_s) + log p(φ_s | server) rises at every E-step and every M-step, on least squares."""
    data = linear_gaussian(6, 4)
    server = prior.init({"w": torch.randn(3, dtype=D, generator=torch.Generator().manual_seed(2))})
    local = [{"weights": {"w": torch.zeros(3, dtype=D)}} for _ in data]
    weight = {"Gaussian": 0.8, "Laplace": 0.3, "Mixture": 0.8}[type(prior).__name__]

    def objective(local: list[Tree], server: Tree) -> float:
        total = 0.0
        for (a, y), phi in zip(data, local, strict=True):
            fit = -0.5 * (y - a @ phi["weights"]["w"]).square().sum()
            total += float(fit + weight * prior.log_prob(Assignment(**phi), server))
        return total

    def e_step(a: Tensor, y: Tensor, phi: Tree, server: Tree) -> Tree:
        """Proximal gradient descent with a step that is safe for this curvature."""
        lr = 0.9 / float(torch.linalg.matrix_norm(a.T @ a, 2) + weight)
        for _ in range(30):
            w = phi["weights"]["w"].clone().requires_grad_()
            loss = 0.5 * (y - a @ w).square().sum() - prior.tempered_log_prob(Assignment({"w": w}), server)
            (grad,) = torch.autograd.grad(loss, w)
            phi = {"weights": {"w": (w - lr * grad).detach()}}
            phi = phi if prior.smooth else prior.prox(phi, server, torch.tensor(lr, dtype=D))
        return phi

    values = [objective(local, server)]
    for _ in range(8):
        local = [e_step(a, y, phi, server) for (a, y), phi in zip(data, local, strict=True)]
        values.append(objective(local, server))
        server = prior.solve(Assignment(**stack(local)), server)
        values.append(objective(local, server))
    assert all(after >= before - 1e-10 for before, after in itertools.pairwise(values))
    assert values[-1] > values[0] + 0.1


@pytest.mark.parametrize("count", [5, 6])
@pytest.mark.parametrize(
    "prior",
    [Gaussian(), Laplace(), Mixture(3, 4.0), StudentT(2.0, 0.5, steps=500), Distance(steps=500)],
    ids=["mean", "median", "responsibilities", "student", "geometric median"],
)
def test_closed_form_m_steps_are_stationary_points(prior: Prior, count: int) -> None:
    """There the gradient of Σ_s log p(φ_s | server) is zero: a sum of differences, of signs, of r (φ − w)."""
    g = torch.Generator().manual_seed(7)
    uploads = Assignment({"w": torch.randn(count, 4, generator=g, dtype=D)})
    server = prior.init({"w": torch.randn(4, generator=g, dtype=D)})
    for _ in range(
        500 if isinstance(prior, Mixture) else 1
    ):  # the mixture's M-step fixes responsibilities, so its stationary point is a fixed point
        server = prior.solve(uploads, server)
    variable = {"weights": {"w": server["weights"]["w"].clone().requires_grad_()}}
    torch.func.vmap(lambda phi: prior.log_prob(phi, variable))(uploads).sum().backward()
    grad = variable["weights"]["w"].grad
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-9)


def test_the_median_beats_every_other_point() -> None:
    """Not only stationary: no point has a higher Laplace likelihood, by brute force on a grid."""
    values = torch.tensor([[0.1], [5.0], [0.3], [-9.0], [0.2]], dtype=D)
    best = Laplace().solve(Assignment({"w": values}), {"weights": {"w": torch.zeros(1, dtype=D)}})["weights"]["w"]
    grid = torch.linspace(-10, 10, 4001, dtype=D)
    likelihood = -(values - grid).abs().sum(0)
    assert float(best) == pytest.approx(0.2)
    assert float(-(values - best).abs().sum()) >= float(likelihood.max()) - 1e-12


def test_spike_slab_closed_form_is_stationary_in_weights_and_probabilities() -> None:
    """∂/∂w Σ z (w_s − w) = 0, and θ = mean z zeroes Σ z/θ − (1 − z)/(1 − θ), hence the gradient in v."""
    prior = SpikeSlab(WeightGating({"w": (3, 4)}), temperature=0.1)
    g = torch.Generator().manual_seed(5)
    server = prior.init({"w": 3 + torch.rand(3, 4, generator=g, dtype=D)})
    z = (torch.rand(8, 3, 4, generator=g, dtype=D) < 0.5).double()
    z[0], z[1] = 0, 1  # every mean lies strictly between 0 and 1
    uploads = Assignment({"w": 3 + torch.rand(8, 3, 4, generator=g, dtype=D)}, {"w": z})
    solved = prior.solve(uploads, server)
    variable = {
        section: {k: v.clone().requires_grad_() for k, v in solved[section].items()}
        for section in ("weights", "thresholds")
    }
    torch.func.vmap(lambda a: prior.log_prob(a, variable))(uploads).sum().backward()
    for section in variable.values():
        for leaf in section.values():
            torch.testing.assert_close(leaf.grad, torch.zeros_like(leaf), rtol=0, atol=1e-9)


def test_responsibilities_are_bayes_rule() -> None:
    prior = Mixture(3, 0.7)
    g = torch.Generator().manual_seed(0)
    centres, phi = torch.randn(3, 5, generator=g, dtype=D), torch.randn(5, generator=g, dtype=D)
    densities = torch.stack([torch.distributions.Normal(c, 0.7**-0.5).log_prob(phi).sum().exp() for c in centres])
    ours = prior.responsibilities(Assignment({"w": phi}), {"weights": {"w": centres}})
    torch.testing.assert_close(ours, densities / densities.sum(), rtol=1e-10, atol=1e-12)


def test_mixture_gradient_is_the_papers() -> None:
    """∂L/∂w_k = λ Σ_s r_sk (φ_s − w_k); ours is of unit scale, without the λ."""
    prior, g = Mixture(3, 0.7), torch.Generator().manual_seed(1)
    centres, phi = torch.randn(3, 5, generator=g, dtype=D).requires_grad_(), torch.randn(5, generator=g, dtype=D)
    server = {"weights": {"w": centres}}
    prior.log_prob(Assignment({"w": phi}), server).backward()
    r = prior.responsibilities(Assignment({"w": phi}), {"weights": {"w": centres.detach()}})
    torch.testing.assert_close(centres.grad, r[:, None] * (phi - centres.detach()))


def test_laplace_prox_is_the_minimiser_and_keeps_weights_equal() -> None:
    """argmin λ|x − w| + (x − φ)²/(2 lr), found on a fine grid; and exactly w wherever |φ − w| ≤ lr·λ."""
    prior, lr = Laplace(0.4), torch.tensor(0.5, dtype=D)
    w, phi = torch.tensor([1.0, 1.0, 1.0, -2.0], dtype=D), torch.tensor([1.15, 1.9, -3.0, -2.2], dtype=D)
    out = prior.prox({"weights": {"w": phi}}, {"weights": {"w": w}}, lr)["weights"]["w"]
    grid = torch.linspace(-5, 5, 200_001, dtype=D)
    for i in range(4):
        cost = 0.4 * (grid - w[i]).abs() + (grid - phi[i]).square() / (2 * 0.5)
        assert float(out[i]) == pytest.approx(float(grid[cost.argmin()]), abs=1e-4)
    assert out[0] == w[0]
    assert out[3] == w[3]


@pytest.mark.parametrize(("lam", "lam2"), [(0.5, 3.0), (1e-3, 40.0), (2.0, 2.5)])
def test_lambda0_is_half_the_log_ratio_of_precisions(lam: float, lam2: float) -> None:
    """Appendix: E_q KL(q(φ|z) ‖ p(φ|z)) = λπ/2 (w_s − w)² + λ0 π + const, with λ0 = ½ log(λ2/λ), for tiny ε."""
    eps, normal = 1e-5, torch.distributions.Normal
    kl = torch.distributions.kl_divergence

    def expected_kl(pi: float, w_s: float, w: float) -> float:
        slab = kl(normal(torch.tensor(w_s, dtype=D), eps), normal(torch.tensor(w, dtype=D), lam**-0.5))
        spike = kl(normal(torch.tensor(0.0, dtype=D), eps), normal(torch.tensor(0.0, dtype=D), lam2**-0.5))
        return float(pi * slab + (1 - pi) * spike)

    lambda0 = 0.5 * math.log(lam2 / lam)
    constant = expected_kl(0.0, 0.0, 0.0)
    gating = WeightGating({"w": (1, 1)})
    prior = SpikeSlab(gating, lambda0=lambda0, precision=lam, cross_entropy=0.0)
    for pi, w_s, w in [(0.3, 0.7, -0.2), (0.9, -1.5, 0.4), (1.0, 0.1, 0.1)]:
        assignment = Assignment(*({"w": torch.full((1, 1), value, dtype=D)} for value in (w_s, pi)))
        server = {"weights": {"w": torch.full((1, 1), w, dtype=D)}, "thresholds": {"w": torch.zeros(1, 1, dtype=D)}}
        penalty = -float(prior.tempered_log_prob(assignment, server))
        assert expected_kl(pi, w_s, w) - constant == pytest.approx(penalty, abs=1e-7)


def test_the_optimiser_m_step_with_sgd_of_rate_one_is_the_mean() -> None:
    """One unit step on the difference gradient lands on the closed form, as FedOpt says of FedAvg."""
    g = torch.Generator().manual_seed(0)
    uploads = {"weights": {"w": torch.randn(7, 5, generator=g, dtype=D)}}
    sgd = Optimiser("SGD", {"lr": 1.0})
    algorithm = Algorithm(Gaussian(), {"weights": sgd}, {"weights": sgd})
    server = algorithm.init({"w": torch.randn(5, generator=g, dtype=D)})
    stepped = m_step(algorithm, server, uploads, TreeOptimiser({"weights": sgd}, server))
    torch.testing.assert_close(stepped["weights"]["w"], uploads["weights"]["w"].mean(0))
