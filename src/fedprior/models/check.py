"""Can this model be trained by many clients at once?"""

import torch
from torch import nn

from fedprior.errors import ModelError


def check_trainable(model: nn.Module) -> None:
    """Refuse what federated training cannot give a meaning to, and say what to use instead."""
    for name, module in model.named_modules():
        batchnorm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if batchnorm or (isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats):
            why = (
                "its running statistics are a state that each client's data moves away from the others'"
                if module.track_running_stats
                else "it makes an example's output depend on the other examples of its batch"
            )
            raise ModelError(f"module {name!r} is a {type(module).__name__}: {why}. Use GroupNorm or LayerNorm instead")
        if isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)):
            kind = type(module).__name__
            raise ModelError(f"module {name!r} is a {kind}, whose random draws no key controls. Use Dropout instead")
    for name, _ in model.named_parameters():
        if "/" in name:
            raise ModelError(
                f"parameter {name!r} has a slash in its name, which separates the names of a path in checkpoints. "
                "Give it a name without one"
            )
    kinds = {parameter.dtype for parameter in model.parameters()}
    if len(kinds) > 1 or kinds - {torch.float32, torch.float64}:
        found = ", ".join(sorted(str(kind) for kind in kinds))
        raise ModelError(f"the model's parameters are {found}; they must all be float32, or all float64")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("the model has no trainable parameters")
