"""Initial weights from a seed. Thresholds start relative to them, so the scheme is a setting of the task."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fedprior.core.errors import SettingError

INITIALISATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "default": None,
    "glorot": nn.init.xavier_uniform_,
    "he": partial(nn.init.kaiming_normal_, nonlinearity="relu"),
}


def initialise(build: Callable[[], nn.Module], scheme: str, seed: int) -> nn.Module:
    """Build a model whose weights depend on the seed alone. The scheme `default` is PyTorch's own."""
    if scheme not in INITIALISATIONS:
        raise SettingError(f"init must be one of {', '.join(INITIALISATIONS)}, got {scheme!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        fill = INITIALISATIONS[scheme]
        if fill is not None:
            for module in model.modules():
                if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)):
                    fill(module.weight)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
    return model
