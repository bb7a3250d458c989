"""torch's optimisers without its compiler.

The first use of an optimiser imports `torch._dynamo`: some 900 modules and as many seconds as torch itself, only to
tell the compiler to keep out. Nothing here is compiled, so it is not asked.
"""

import inspect

import torch
from torch.optim import Optimizer

for _name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    # torch keeps there what it calls instead of the function. Other versions of torch do not look: nothing is lost.
    _plain = getattr(getattr(Optimizer, _name), "__wrapped__", None)
    if _plain is not None and not hasattr(_plain, "__dynamo_disable"):
        _plain.__dynamo_disable = _plain


def take_step(optimiser: Optimizer) -> None:
    """Do what `optimiser.step()` does, without the hooks of profilers and of the compiler."""
    if optimiser.defaults.get("differentiable"):
        optimiser.step()
    else:
        with torch.no_grad():
            inspect.unwrap(type(optimiser).step)(optimiser)
