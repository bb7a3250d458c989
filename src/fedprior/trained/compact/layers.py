"""Remove some units from one layer or norm."""

import copy

from torch import Tensor, nn

from fedprior.core.errors import ModelError
from fedprior.trained.compact.norm import PrunedNorm
from fedprior.units.torch_operations import BATCH_NORMS, CONVOLUTIONS, INSTANCE_NORMS


def read_columns(layer: nn.Linear) -> Tensor:
    """Which inputs of a linear layer have a weight that is not zero."""
    return (layer.weight != 0).any(0)


def shrink_layer(name: str, layer: nn.Module, rows: Tensor | None, columns: Tensor | None) -> None:
    """Keep only these rows and columns of a layer's weight; None keeps all."""
    if "weight" not in layer._parameters:
        raise ModelError(f"module {name!r} computes its weight from other parameters")
    if rows is None and columns is None:
        return  # a new parameter would lose the tie to the old one's other place
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    if columns is not None:
        weight = weight[:, columns]
    if rows is not None:
        weight = weight[rows]
        if isinstance(bias, Tensor):
            layer.bias = nn.Parameter(bias.detach()[rows])
    layer.weight = nn.Parameter(weight.detach().clone())
    outputs, inputs = weight.shape[:2]
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = outputs, inputs
    elif isinstance(layer, CONVOLUTIONS):
        layer.out_channels, layer.in_channels = outputs, inputs * layer.groups


def smaller_norm(norm: nn.Module, keep: Tensor, axis: int) -> nn.Module:
    """The norm of the kept channels, with the statistics of all channels."""
    if bool(keep.all()):
        return norm
    if not isinstance(norm, (nn.GroupNorm, nn.LayerNorm)):  # instance and batch norms treat channels separately
        assert isinstance(norm, (*INSTANCE_NORMS, *BATCH_NORMS))
        small = copy.deepcopy(norm)
        small.num_features = int(keep.sum())
        if norm.affine:
            small.weight, small.bias = (nn.Parameter(p.detach()[keep]) for p in (norm.weight, norm.bias))
        if norm.running_mean is not None and norm.running_var is not None:
            small.running_mean, small.running_var = norm.running_mean[keep], norm.running_var[keep]
        return small
    groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else 1
    kept = [int(part.sum()) for part in keep.chunk(groups)]
    weight, bias = norm.weight.detach()[keep], None if norm.bias is None else norm.bias.detach()[keep]
    new = PrunedNorm(
        tuple(k for k in kept if k), len(keep) // groups, tuple(weight.shape), axis, norm.eps, bias is not None
    )
    new.weight = nn.Parameter(weight)
    if bias is not None:
        new.bias = nn.Parameter(bias)
    return new.eval()
