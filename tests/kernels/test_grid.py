"""More rows than a grid's second and third axis take: 65,535 on NVIDIA's GPUs."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import fedprior.kernels
from fedprior.core import keys
from fedprior.kernels import BatchedKernels, concrete, draws, gates
from fedprior.kernels.launch import row_grid
from fedprior.units.rows import Rows, scale_rows

NEEDS_TRITON = False
MANY = 65_537
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the limit is a GPU's; an interpreter has none")


def test_all_programs_are_on_the_first_axis():
    """The only one that takes more than 65,535; what a kernel reads is what its launch must give."""
    folder = Path(fedprior.kernels.__file__).parent
    used = {
        axis
        for path in folder.glob("*.py")
        for axis in re.findall(r"(?:program_id|num_programs)\((.*?)\)", path.read_text())
    }
    assert used == {"0"}


def test_a_program_for_every_block_of_every_row():
    assert row_grid(MANY, 1, 1024) == (MANY,)
    assert row_grid(3, 1025, 1024) == (6,)
    assert row_grid(3, 0, 1024) == (0,)


@on_gpu
def test_keys(device):
    each = keys.fold(keys.key(7, device), torch.arange(MANY, device=device))
    x = torch.randn(MANY, 3, device=device)
    found = draws.uniform(each, (1100,)), draws.bits(each, 2), vmap(lambda x, key: draws.dropout(x, key, 0.5))(x, each)
    assert torch.equal(found[0], vmap(lambda key: keys.uniform(key, (1100,)))(each))
    assert torch.equal(found[1], vmap(lambda key: keys.bits(key, 2))(each))
    torch.testing.assert_close(found[2], vmap(lambda x, key: keys.dropout(x, key, 0.5))(x, each))


@on_gpu
def test_gates_and_their_gradients(device):
    layers = (Rows(3, 2),)
    w, b, z = (torch.randn(MANY, *shape, device=device) for shape in ((3, 5), (3,), (3,)))
    torch.testing.assert_close(vmap(lambda w: gates.norms([w]))(w), w.norm(dim=-1))
    cubes = lambda scale: lambda z, w, b: sum(s.pow(3).sum() for s in scale(layers, z, (w, b)))  # noqa: E731
    slopes = [vmap(grad(cubes(scale), (0, 1, 2)))(z, w, b) for scale in (gates.scale, scale_rows)]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-4)


@on_gpu
def test_logits_and_draws_from_them(device):
    norms, v = (torch.rand(MANY, 3, device=device) for _ in range(2))
    each = keys.fold(keys.key(7, device), torch.arange(MANY, device=device))
    edges, stretch = concrete.Edges(-30.0, 30.0, -30.0), concrete.Stretch(2 / 3, -0.1, 1.1, 0.0)
    weighed = lambda n, v: (concrete.logits_and_gates(n, v, None, 0.5, edges)[1]).sum()  # noqa: E731
    plain = lambda n, v: ((n - F.softplus(v)) / 0.5).sigmoid().sum()  # noqa: E731
    torch.testing.assert_close(*(vmap(grad(f, 1))(norms, v) for f in (weighed, plain)), rtol=1e-4, atol=1e-5)
    drawn = lambda logits, key: concrete.hard_concrete(logits, key, stretch)  # noqa: E731
    slope = lambda logits, key: grad(lambda x: drawn(x, key).sum())(logits)  # noqa: E731
    for function in (drawn, slope):
        whole, last = vmap(function)(norms, each), vmap(function)(norms[-2:], each[-2:])
        torch.testing.assert_close(whole[-2:], last)


@on_gpu
@pytest.mark.parametrize(("clients", "images"), [(MANY, 1), (1, MANY)])
def test_convolutions_and_norms(device, clients, images, monkeypatch):
    """16 channels and nine taps: the input is copied to channels last."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x = torch.randn(clients, images, 16, 3, 3, device=device)
    w, b = torch.randn(clients, 2, 16, 3, 3, device=device), torch.randn(clients, 2, device=device)

    def loss(x, w, b):
        return F.group_norm(F.conv2d(x, w, b, padding=1), 1, b, b).pow(2).sum()

    with BatchedKernels(force=True) as mode:
        ours = vmap(grad(loss, (0, 1, 2)))(x, w, b)
    assert mode.routed
    rows = slice(None) if clients == 1 else slice(-3, None)
    for found, expected in zip(ours, vmap(grad(loss, (0, 1, 2)))(x[rows], w[rows], b[rows]), strict=True):
        torch.testing.assert_close(found[rows], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
