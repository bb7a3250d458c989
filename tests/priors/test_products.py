"""The Gaussian over products: the exact M-step against NumPy's singular value decomposition."""

import numpy as np
import pytest
import torch

import fedprior
from fedprior.core.adapters import Adapter
from fedprior.priors import Assignment, Products

RANK, OUT, IN, CLIENTS = 3, 7, 5, 4
PRIOR = Products(0.5, (Adapter("fc", "a", "b"),))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sent() -> dict[str, torch.Tensor]:
    """Clients' factors near a common start, as after local training, and one other weight."""
    return {
        "a": draw(RANK, IN) + 0.3 * draw(CLIENTS, RANK, IN, seed=1),
        "b": 0.5 * draw(CLIENTS, OUT, RANK, seed=2),
        "head": draw(CLIENTS, 2, seed=3),
    }


@pytest.mark.parametrize("counts", [None, (1, 5, 2, 2)])
def test_the_m_step_is_the_best_approximation_of_the_mean_product(counts):
    uploads = sent()
    weight = None if counts is None else torch.tensor(counts, dtype=torch.float64)
    share = np.full(CLIENTS, 1 / CLIENTS) if counts is None else np.array(counts) / sum(counts)
    products = np.stack([(b @ a).numpy() for a, b in zip(uploads["a"], uploads["b"], strict=True)])
    u, s, v = np.linalg.svd(np.tensordot(share, products, 1))
    solved = PRIOR.solve(Assignment(uploads), {"weights": {k: x[0] for k, x in uploads.items()}}, weight)["weights"]
    np.testing.assert_allclose((solved["b"] @ solved["a"]).numpy(), (u[:, :RANK] * s[:RANK]) @ v[:RANK], atol=1e-7)
    np.testing.assert_allclose(solved["head"].numpy(), np.tensordot(share, uploads["head"].numpy(), 1))
    factors = solved["b"] - uploads["b"].mean(0)
    assert factors.abs().max() > 0.01, "the mean of the factors is something else"


def test_no_factors_nearby_have_a_larger_log_probability():
    uploads = sent()
    solved = PRIOR.solve(Assignment(uploads), {"weights": {k: x[0] for k, x in uploads.items()}})["weights"]

    def log_prob(weights):
        each = [
            PRIOR.density(Assignment({k: x[s] for k, x in uploads.items()}), {"weights": weights}) for s in range(4)
        ]
        return torch.stack(each).sum()

    best = log_prob(solved)
    for seed in range(20):
        moved = {name: x + 0.02 * draw(*x.shape, seed=seed) for name, x in solved.items()}
        assert log_prob(moved) < best


def test_the_density_is_that_of_the_products():
    one, other = ({k: x[s] for k, x in sent().items()} for s in (0, 1))
    apart = (one["b"] @ one["a"] - other["b"] @ other["a"]).square().sum() + (
        one["head"] - other["head"]
    ).square().sum()
    torch.testing.assert_close(PRIOR.density(Assignment(one), {"weights": other}), -apart / 2)
    turned = {**one, "a": 2 * one["a"], "b": one["b"] / 2}
    assert abs(float(PRIOR.density(Assignment(turned), {"weights": one}))) < 1e-12, "other factors, the same product"


def test_the_first_factor_keeps_its_size_and_place_so_that_no_component_dies():
    uploads = sent()
    alike = uploads["a"][:1].expand_as(uploads["a"])
    flat = {**uploads, "a": alike, "b": uploads["b"] * torch.tensor([1.0, 0.0, 0.0])}
    for each in (uploads, flat, {**uploads, "b": torch.zeros_like(uploads["b"])}):
        mean = each["a"].mean(0)
        solved = PRIOR.solve(Assignment(each), {"weights": {k: x[0] for k, x in each.items()}})["weights"]
        a = solved["a"]
        torch.testing.assert_close(a @ a.T, torch.eye(RANK, dtype=a.dtype) * mean.square().sum() / RANK)
        turns = (torch.linalg.qr(draw(RANK, RANK, seed=seed))[0] for seed in range(20))
        assert all((a - mean).norm() <= (turn @ a - mean).norm() for turn in turns), "as near as can be to the mean"
        product = torch.einsum("sor,sri->oi", each["b"], each["a"]) / CLIENTS
        if each is not uploads:  # of rank one and zero, nothing is lost
            torch.testing.assert_close(solved["b"] @ a, product, rtol=0, atol=1e-6)
        if not each["b"].any():  # nothing but the mean A says where to go on
            torch.testing.assert_close(mean @ a.T @ a * RANK / mean.square().sum(), mean)


def test_a_server_optimiser_is_refused():
    network = fedprior.Network(fedprior.adapt(torch.nn.Linear(3, 2)), torch.zeros(3))
    with pytest.raises(fedprior.SettingError, match="closed-form M-step"):
        fedprior.algorithm("fedadam", network, products=True)
