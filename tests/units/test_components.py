"""Components of adapters as units, against loops over them."""

import pytest
import torch
from torch import nn

import fedprior
from fedprior.units import UnitGating, find_structure
from small_world import small_net


@pytest.fixture(scope="module")
def gating() -> UnitGating:
    return UnitGating(find_structure(fedprior.adapt(small_net(), 3), torch.randn(1, 8, 8)))


@pytest.fixture(scope="module")
def params(gating):
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in gating.shapes.items()}


def test_a_component_is_a_row_of_one_factor_and_a_column_of_the_other(gating, params):
    assert gating.gate_shapes == {"fc1": (3,), "fc2": (3,)}
    assert gating.sizes() == {"fc1": 36 + 12, "fc2": 12 + 4}
    gates = {"fc1": torch.tensor([1.0, 0.0, 1.0]), "fc2": torch.tensor([0.0, 1.0, 1.0])}
    for scaled in (gating.apply(params, gates), gating.scale(params, gating.join(gates)), gating.prune(params, gates)):
        for layer, closed in (("fc1", 1), ("fc2", 0)):
            a, b = params[f"{layer}.down.weight"].clone(), params[f"{layer}.up.weight"].clone()
            a[closed], b[:, closed] = 0, 0
            torch.testing.assert_close(scaled[f"{layer}.down.weight"], a, rtol=0, atol=0)
            torch.testing.assert_close(scaled[f"{layer}.up.weight"], b, rtol=0, atol=0)
    assert int(gating.effective_parameters(gates)) == 2 * 48 + 2 * 16


def test_norms_and_strengths_of_components(gating, params):
    norms, strengths, magnitudes = (
        gating.norms(params),
        gating.strengths(params),
        gating.part(gating.magnitudes(params)),
    )
    for layer in ("fc1", "fc2"):
        a, b = params[f"{layer}.down.weight"], params[f"{layer}.up.weight"]
        for i in range(3):
            both = torch.cat([a[i], b[:, i]]).norm()
            torch.testing.assert_close(norms[layer][i], both)
            torch.testing.assert_close(magnitudes[layer][i], both)
            torch.testing.assert_close(strengths[layer][i], torch.linalg.matrix_norm(torch.outer(b[:, i], a[i])))


def test_a_network_that_cannot_be_traced_has_components_all_the_same():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(x) if x.sum() > 0 else -self.fc(x)

    structure = find_structure(fedprior.adapt(Branches(), 2), torch.ones(3))
    assert [layer.name for layer in structure.layers] == ["fc"]


def test_adapters_can_be_left_without_gates_and_other_names_are_refused():
    net, example = fedprior.adapt(small_net(), 3, train="fc2"), torch.randn(1, 8, 8)
    with pytest.raises(fedprior.ModelError, match=r"'fc2' has no adapter; the network's adapters are in \['fc1'\]"):
        find_structure(net, example, ungated=["fc2"])
    with pytest.raises(fedprior.ModelError, match="no components to gate"):
        find_structure(net, example, ungated=["fc1"])
    network = fedprior.Network(net, example)
    with pytest.raises(fedprior.SettingError, match="the components of adapters have the gates"):
        fedprior.algorithm("fedsparse", network, gate_output=True)
    with pytest.raises(fedprior.SettingError, match="the network has no adapters"):
        fedprior.algorithm("fedavg", fedprior.Network(small_net(), example), products=True)
