"""Check that many clients can train a model at once."""

import torch
from torch import nn

from fedprior.core.batch_norm import find_norms
from fedprior.core.errors import ModelError, described


def check_statistics(model: nn.Module, kind: str) -> None:
    """Refuse custom code around `F.batch_norm` if the run does not share the layers' statistics."""
    for norm in find_norms(model):
        owner = model.get_submodule(norm.name.rstrip("."))
        if kind != "shared" and not isinstance(owner, nn.modules.batchnorm._BatchNorm):
            raise ModelError(
                f"module {norm.name.rstrip('.')!r} has a running_mean but is not torch's BatchNorm, the only one that "
                f"supports statistics={kind}. Use nn.BatchNorm, or statistics=shared"
            )


def check_trainable(model: nn.Module) -> None:
    """Refuse models for which federated training has no meaning, and say what to use instead."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model is {described(model)}, not a torch.nn.Module; pass a module such as torch.nn.Linear(3, 2)"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.track_running_stats:
            raise ModelError(
                f"module {name!r} is {described(module)} that stores no statistics. "
                "Set track_running_stats=True; to store nothing, use statistics=batch"
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            raise ModelError(
                f"module {name!r} is {described(module)}: its running statistics would drift apart between "
                "clients. Set track_running_stats=False, or use GroupNorm instead"
            )
        if isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)):
            raise ModelError(
                f"module {name!r} is {described(module)}, whose draws fedprior cannot control. Use Dropout instead"
            )
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ModelError(f"parameter {name!r} has no shape yet: run the model once on an example first")
        if "/" in name:
            raise ModelError(
                f"parameter {name!r} has a slash in its name, but checkpoints separate names with slashes. Rename it"
            )
    kinds = {parameter.dtype for parameter in model.parameters()}
    if len(kinds) > 1 or kinds - {torch.float32, torch.float64}:
        found = ", ".join(sorted(str(kind) for kind in kinds))
        raise ModelError(f"the model's parameters are {found}; they must all be float32, or all float64")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("the model has no trainable parameters")
