"""Can this model be trained by many clients at once?"""

import torch
from torch import nn

from fedprior.core.batch_norm import find_norms
from fedprior.core.errors import ModelError


def check_statistics(model: nn.Module, kind: str) -> None:
    """Refuse code of one's own around `F.batch_norm` where its statistics are not those of the run."""
    for norm in find_norms(model):
        owner = model.get_submodule(norm.name.rstrip("."))
        if kind != "shared" and not isinstance(owner, nn.modules.batchnorm._BatchNorm):
            raise ModelError(
                f"module {norm.name.rstrip('.')!r} has a running_mean but is not torch's BatchNorm, which alone can do "
                f"with statistics={kind}. Use that, or statistics=shared"
            )


def check_trainable(model: nn.Module) -> None:
    """Refuse what federated training cannot give a meaning to, and say what to use instead."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ModelError(f"the model is {kind}, not a torch.nn.Module; give a module, as torch.nn.Linear(3, 2)")
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.track_running_stats:
            raise ModelError(
                f"module {name!r} is a {type(module).__name__} that stores no statistics. "
                "Set track_running_stats=True; with statistics=batch nothing is stored"
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            raise ModelError(
                f"module {name!r} is a {type(module).__name__}: its running statistics are a state that each client's "
                "data moves away from the others'. Set track_running_stats=False, or use GroupNorm instead"
            )
        if isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)):
            kind = type(module).__name__
            raise ModelError(f"module {name!r} is a {kind}, whose random draws no key controls. Use Dropout instead")
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ModelError(f"parameter {name!r} has no shape yet: run the model once on an example first")
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
