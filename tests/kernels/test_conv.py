import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.func import functional_call, grad, vmap

from fedprior.kernels import BatchedKernels
from fedprior.kernels.conv import Tile, channels_last, forward, grad_bias, grad_input, grad_weight
from fedprior.kernels.conv_autograd import conv2d

quick = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def convolutions(draw):
    size = st.integers(3, 6)
    kernel = st.integers(1, 3)
    pair = lambda s: draw(st.tuples(s, s))  # noqa: E731
    shape = pair(size)
    taps = pair(kernel)
    stride, padding = pair(st.integers(1, 3)), pair(st.integers(0, 2))
    channels = draw(st.sampled_from([1, 3, 16, 20]))
    assume(all(n + 2 * p >= k for n, p, k in zip(shape, padding, taps, strict=True)))
    return channels, draw(st.sampled_from([1, 5, 16, 33])), shape, taps, stride, padding, draw(st.booleans())


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def tensors(case, device, clients=2, images=2):
    inputs, outputs, shape, taps, stride, padding, bias = case
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients, images, inputs, *shape, generator=generator).to(device)
    weight = torch.randn(clients, outputs, inputs, *taps, generator=generator).to(device)
    b = torch.randn(clients, outputs, generator=generator).to(device) if bias else None
    return x, weight, b, stride, padding


def naive(x, weight, bias, stride, padding):
    """torch's own convolution, client by client, in double precision."""
    each = range(len(x))
    return torch.stack([F.conv2d(x[i], weight[i], None if bias is None else bias[i], stride, padding) for i in each])


def doubles(*values):
    return [None if v is None else v.double().requires_grad_() for v in values]


@quick
@given(convolutions())
def test_the_three_products_equal_torchs(device, case):
    x, weight, bias, stride, padding = tensors(case, device)
    leaves = doubles(x, weight, bias)
    out = naive(*leaves, stride, padding)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    out.backward(g.double())
    close(forward(x, weight, bias, stride, padding), out.detach().float())
    close(grad_input(g, weight, x.shape[3:], stride, padding), leaves[0].grad.float())
    dw, db = grad_weight(x, g, weight.shape[3:], stride, padding, bias is not None)
    close(dw, leaves[1].grad.float())
    if bias is not None:
        close(db, leaves[2].grad.float())


@pytest.mark.parametrize(("swap", "unroll", "depth"), [(False, False, 32), (True, False, 16), (True, True, 32)])
def test_every_tile_gives_the_same_numbers(device, swap, unroll, depth):
    x, weight, bias, stride, padding = tensors((16, 18, (5, 4), (3, 3), (2, 1), (1, 1), True), device)
    leaves = doubles(x, weight, bias)
    out = naive(*leaves, stride, padding)
    out.sum().backward()
    g = torch.ones_like(out).float()
    tile = Tile(16, 16, depth, swap=swap, unroll=unroll, last=depth == 32, splits=4)
    close(forward(x, weight, bias, stride, padding, tile), out.detach().float())
    close(grad_input(g, weight, x.shape[3:], stride, padding, tile), leaves[0].grad.float())
    dw, db = grad_weight(x, g, weight.shape[3:], stride, padding, True, tile)
    close(dw, leaves[1].grad.float())
    close(db, leaves[2].grad.float())


@pytest.mark.parametrize("splits", [0, 1, 4])
@pytest.mark.parametrize("shape", [(5, 3, 7, 3), (1, 2, 1, 1), (64, 1, 1, 1), (9, 2, 33, 40), (2, 1, 70, 61)])
def test_the_biases_gradient_is_the_sum(device, shape, splits):
    """Odd numbers of images and places, one of each, more than a program reads at once, and shares without an image."""
    generator = torch.Generator().manual_seed(0)
    g = (torch.randn(3, *shape, generator=generator) + 1).to(device)
    close(grad_bias(g, splits), g.double().sum((1, 3, 4)).float())


def test_the_biases_gradient_of_strided_gradients(device):
    """Every other client's, all clients' the same, and channels-last."""
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(4, 3, 5, 2, 6, generator=generator).to(device)
    for each in (g[::2], g[:1].expand(4, *g.shape[1:]), g.movedim(2, 4), g[:, :, 1:3]):
        close(grad_bias(each, 2), each.double().sum((1, 3, 4)).float())


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 6, 3, padding="same")
        self.conv2 = torch.nn.Conv2d(6, 4, 3, stride=2, bias=False)
        self.fc = torch.nn.Linear(4 * 2 * 2, 3)

    def forward(self, x):
        x = self.conv2(torch.tanh(self.conv1(x)))
        return self.fc(torch.tanh(x).flatten(1))


def clients(device, n=2):
    torch.manual_seed(0)
    nets = [Net().to(device) for _ in range(n)]
    params, _ = torch.func.stack_module_state(nets)
    return nets[0], {k: v.detach() for k, v in params.items()}


def test_gradients_of_a_model_through_the_mode(device):
    net, params = clients(device)
    x, y = torch.randn(2, 3, 3, 5, 5, device=device), torch.randint(3, (2, 3), device=device)
    loss = lambda p, x, y: F.cross_entropy(functional_call(net, p, (x,)), y)  # noqa: E731
    expected = vmap(grad(loss))(params, x, y)
    with BatchedKernels(force=True) as mode:
        ours = vmap(grad(loss))(params, x, y)
        shared = vmap(grad(loss), (0, None, None))(params, x[0], y[0])
    assert mode.routed == 6
    close(ours, expected)
    # Images that all clients share.
    close(shared, vmap(grad(loss), (0, None, None))(params, x[0], y[0]))


def test_nested_vmaps_fold_into_one(device):
    net, params = clients(device, 4)
    params = {k: v.unflatten(0, (2, 2)) for k, v in params.items()}
    x, y = torch.randn(2, 2, 3, 5, 5, device=device), torch.randint(3, (2, 2), device=device)
    loss = lambda p, x, y: F.cross_entropy(functional_call(net, p, (x,)), y)  # noqa: E731
    twice = vmap(vmap(grad(loss), (0, None, None)), (0, 0, 0))
    expected = twice(params, x, y)
    with BatchedKernels(force=True):
        close(twice(params, x, y), expected)


def test_differentiates_twice(device):
    net, params = clients(device, 2)
    x = torch.randn(2, 2, 3, 5, 5, device=device)

    def penalty(p, x):
        slope = grad(lambda p, x: functional_call(net, p, (x,)).square().sum(), (0, 1))(p, x)
        return sum(v.square().sum() for v in slope[0].values()) + slope[1].square().sum()

    curve = vmap(grad(penalty))
    expected = curve(params, x)
    with BatchedKernels(force=True):
        ours = curve(params, x)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-3 * float(value.abs().max()))


def test_the_first_layer_costs_no_input_gradient(device, monkeypatch):
    net, params = clients(device)
    asked = []
    original = grad_input
    monkeypatch.setattr(
        "fedprior.kernels.conv.grad_input", lambda *a, **k: asked.append(a[1].shape) or original(*a, **k)
    )
    x = torch.randn(2, 2, 3, 5, 5, device=device)
    with BatchedKernels(force=True):
        vmap(grad(lambda p, x: functional_call(net, p, (x,)).sum()))(params, x)
    assert asked == [(2, 4, 6, 3, 3)]


def test_one_copy_of_the_weights_serves_a_convolution_and_its_inputs_gradient(device, monkeypatch):
    net, params = clients(device)
    copied = []
    monkeypatch.setattr("fedprior.kernels.conv.channels_last", lambda w: copied.append(w.shape) or channels_last(w))
    x = torch.randn(2, 2, 3, 5, 5, device=device)
    with BatchedKernels(force=True):
        vmap(grad(lambda p, x: functional_call(net, p, (x,)).sum()))(params, x)
    assert copied == [params["conv1.weight"].shape, params["conv2.weight"].shape]


@pytest.mark.parametrize(("channels", "taps"), [(1, 2), (3, 1)])
def test_one_channel_and_one_tap_through_the_mode(device, channels, taps):
    """Their weights are channels-last as they are."""
    x, weight, *_ = tensors((channels, 5, (4, 3), (taps, taps), (1, 1), (0, 0), False), device)
    slopes = vmap(grad(lambda x, w: F.conv2d(x, w).square().sum(), (0, 1)))
    expected = slopes(x, weight)
    with BatchedKernels(force=True) as mode:
        close(slopes(x, weight), expected)
    assert mode.routed == 1


def test_no_gradient_behind_what_has_none(device):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    x, weight = (torch.randn(shape, device=device, requires_grad=True) for shape in ((1, 2, 3, 3), (1, 2, 2, 2)))
    out = Stop.apply(conv2d(x, weight, None, (1, 1), (0, 0))).sum()
    assert torch.autograd.grad(out, (x, weight), allow_unused=True) == (None, None)


def test_unsupported_calls_go_to_torch(device):
    x = torch.randn(2, 3, 4, 6, 6, device=device, dtype=torch.float64)
    weight = torch.randn(2, 4, 4, 3, 3, device=device, dtype=torch.float64)
    with BatchedKernels(force=True) as mode:
        vmap(F.conv2d)(x, weight)
        vmap(lambda x, w: F.conv2d(x, w, dilation=2))(x.float(), weight.float())
        vmap(lambda x, w: F.conv2d(x, w, groups=2))(x.float(), weight.float()[:, :, :2])
        vmap(F.conv2d, (0, None))(x.float(), weight[0].float())
        F.conv2d(x[0].float(), weight[0].float())
    assert mode.routed == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_a_captured_graph_replays_on_new_data(device):
    net, params = clients(device)
    x, y = torch.randn(2, 3, 3, 5, 5, device=device), torch.randint(3, (2, 3), device=device)
    slope = vmap(grad(lambda p, x, y: F.cross_entropy(functional_call(net, p, (x,)), y)))
    with BatchedKernels():
        slope(params, x, y)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = slope(params, x, y)
    x.normal_()
    graph.replay()
    close(captured, slope(params, x, y))
