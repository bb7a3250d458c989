"""Adapters: a network that is frozen, starts as it was, and trains low-rank products beside its linear layers."""

import warnings

import pytest
import torch
from torch import nn

import fedprior
from fedprior.core.adapters import Adapted, find_adapters, merged
from fedprior.core.frozen import copied, fingerprint, frozen_parameters
from small_world import small_net


def trained_names(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if p.requires_grad}


def excite(module: nn.Module) -> nn.Module:
    """Second factors that are not zero, as after training."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, Adapted):
                part.up.weight.copy_(torch.randn(part.up.weight.shape, generator=draw))
    return module


def test_an_adapted_network_starts_as_the_network_and_only_adapters_and_heads_are_trained():
    base, x = small_net(), torch.randn(3, 1, 8, 8)
    adapted = fedprior.adapt(base, rank=3, train="fc2")
    torch.testing.assert_close(adapted(x), base(x), rtol=0, atol=0)
    assert trained_names(adapted) == {"fc1.down.weight", "fc1.up.weight", "fc2.weight", "fc2.bias"}
    assert adapted.fc1.down.weight.shape == (3, 36)
    assert adapted.fc1.up.weight.shape == (12, 3)
    assert all(p.requires_grad for p in base.parameters()), "the network itself does not change"


def test_frozen_weights_share_their_memory_and_heads_have_their_own():
    base = small_net()
    adapted = fedprior.adapt(base, train=["fc2"])
    other = copied(adapted)
    for module in (adapted, other):
        assert module.conv.weight.data_ptr() == base.conv.weight.data_ptr()
        assert module.fc1.base.weight.data_ptr() == base.fc1.weight.data_ptr()
        assert module.fc2.weight.data_ptr() != base.fc2.weight.data_ptr()
    assert other.fc1.down.weight.data_ptr() != adapted.fc1.down.weight.data_ptr()
    assert frozen_parameters(adapted) == 4 * 10 + 36 * 12 + 12
    assert fingerprint(other) == fingerprint(adapted) != ""
    assert fingerprint(base) == ""
    with torch.no_grad():
        changed = fedprior.adapt(small_net(seed=1), train=["fc2"])
    assert fingerprint(changed) != fingerprint(adapted)


def test_layers_are_chosen_by_name_by_the_end_of_a_name_or_by_a_pattern():
    net = nn.ModuleDict({k: nn.ModuleDict({"query": nn.Linear(4, 4), "value": nn.Linear(4, 2)}) for k in ("a", "b")})

    def chosen(*targets: str) -> list[str]:
        return [adapter.name for adapter in find_adapters(fedprior.adapt(net, 3, targets or None))]

    assert chosen() == ["a.query", "a.value", "b.query", "b.value"]
    assert chosen("query") == ["a.query", "b.query"]
    assert chosen("b.value", "a.query") == ["a.query", "b.value"]
    assert chosen("a.*") == ["a.query", "a.value"]
    assert fedprior.adapt(net, 3)["a"]["value"].up.weight.shape == (2, 2), "a layer's rank is the highest there is"


def test_the_same_seed_draws_the_same_factors_whatever_the_global_generator_says():
    torch.manual_seed(1)
    one = fedprior.adapt(small_net(), seed=3)
    torch.manual_seed(2)
    same, other = fedprior.adapt(small_net(), seed=3), fedprior.adapt(small_net(), seed=4)
    assert torch.equal(one.fc1.down.weight, same.fc1.down.weight)
    assert not torch.equal(one.fc1.down.weight, other.fc1.down.weight)
    assert one.fc1.down.weight.abs().max() <= 36**-0.5


def test_alpha_scales_and_merging_makes_one_linear_layer_of_each():
    base, x = small_net(dtype=torch.float64), torch.randn(5, 1, 8, 8, dtype=torch.float64)
    adapted = excite(fedprior.adapt(base, rank=4, alpha=8.0))
    y = adapted.fc1(x.flatten(1)[:, :36])
    beside = x.flatten(1)[:, :36] @ adapted.fc1.down.weight.T @ adapted.fc1.up.weight.T * (8 / 4)
    torch.testing.assert_close(y, base.fc1(x.flatten(1)[:, :36]) + beside)
    whole = merged(adapted)
    torch.testing.assert_close(whole(x), adapted(x))
    assert type(whole.fc1) is nn.Linear
    assert not torch.equal(whole.fc1.weight, base.fc1.weight)
    torch.testing.assert_close(adapted.fc1.base.weight, base.fc1.weight, rtol=0, atol=0)
    assert merged(base) is base


@pytest.mark.parametrize("stack", [False, True])
def test_torchs_transformer_layers_call_their_adapters_in_evaluation(stack):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, 1) if stack else layer
    adapted = excite(fedprior.adapt(module, 2).eval())
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        quick = adapted(x, src_key_padding_mask=padding)
    with torch.enable_grad():
        slow = adapted(x, src_key_padding_mask=padding)
    torch.testing.assert_close(quick[0], slow[0])
    assert not torch.allclose(quick[0], module.eval()(x[:1])[0])


class OfPeft(nn.Module):
    """What `peft` puts around a linear layer, as far as we look at it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, layer.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))

    def merge(self):
        self.base_layer.weight.data += 2 * self.lora_B["default"].weight @ self.lora_A["default"].weight

    def get_base_layer(self):
        return self.base_layer


def test_what_peft_has_wrapped_is_recognised():
    net = small_net()
    net.fc1 = OfPeft(net.fc1, 3)
    (adapter,) = find_adapters(net)
    assert adapter == ("fc1.default", "fc1.lora_A.default.weight", "fc1.lora_B.default.weight")
    gating = fedprior.algorithm("fedsparse", fedprior.Network(net, torch.randn(1, 8, 8))).prior.gating
    assert gating.gate_shapes == {"fc1.default": (3,)}
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(merged(net)(x), net(x))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rank": 0}, "rank must be a whole number of at least 1"),
        ({"rank": 2.0}, "rank must be a whole number"),
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"targets": "fc3"}, "'fc3' names no layer; there are fc1, fc2"),
        ({"targets": "conv"}, "'conv' is no linear layer"),
        ({"train": "head"}, "has no module 'head'"),
        ({"train": ["fc1", "fc2"]}, "no linear layer to adapt"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, says):
    with pytest.raises(fedprior.FedpriorError, match=says):
        fedprior.adapt(small_net(), **arguments)


def test_networks_that_cannot_be_adapted_are_refused():
    with pytest.raises(fedprior.ModelError, match="has adapters already"):
        fedprior.adapt(fedprior.adapt(small_net()))
    with pytest.raises(fedprior.ModelError, match=r"not a str"):
        fedprior.adapt("bert")
    with pytest.raises(fedprior.ModelError, match="no linear layer that the network calls"):
        fedprior.adapt(nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4)), targets="out_proj")
