"""What the priors with gates share."""

import torch
from torch import Tensor

from fedprior import keys
from fedprior.trees import Params, Tree
from fedprior.units import Gating
from fedprior.wire import Layout, Section


def gated_mean(gating: Gating, assignments: Tree, server: Tree) -> Params:
    """w = Σ_s z_s φ_s / Σ_s z_s; a weight that no client sent keeps its value."""
    sent = torch.func.vmap(gating.mask)(assignments["gates"])
    means = {}
    for name, values in assignments["weights"].items():
        if name not in sent:
            means[name] = values.mean(0)
            continue
        total = sent[name].sum(0)
        mean = (sent[name] * values).sum(0) / total.clamp(min=1)
        means[name] = torch.where(total > 0, mean, server["weights"][name])
    return means


def gated_layout(gating: Gating, server: Tree, thresholds: bool = False) -> Layout:
    """Gates, what they leave of the weights, and if asked one threshold an open gate."""
    sections = {"weights": Section(gating.shapes, gating.mask)}
    if thresholds:
        # A logit is (‖w‖ − τ) / T with T = 1e-3: whole numbers are too coarse. One a unit costs next to nothing in
        # full; one a weight is as many as the weights, and near enough in float16, because τ is then small.
        few = any(size > 1 for size in gating.sizes().values())
        sections["thresholds"] = Section(gating.gate_shapes, dict, precision="float32" if few else "float16")
    dtype = next(iter(server["weights"].values())).dtype
    return Layout(sections, gating.gate_shapes, dtype, wiring=gating.wiring)


def joint_draws(gating: Gating, key: Tensor, dtype: torch.dtype) -> Tensor:
    """One uniform number a gate, all layers in one vector."""
    return keys.uniform(key, (sum(torch.Size(shape).numel() for shape in gating.gate_shapes.values()),), dtype)
