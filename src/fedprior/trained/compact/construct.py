"""Write the code that constructs a torch.nn module, with arguments read back from the module itself."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprior.core.errors import ModelError

PLAIN = (bool, int, float, str, type(None))
RECURRENT = ("num_layers", "bias", "batch_first", "dropout", "bidirectional")
Arguments = tuple[dict[str, Any], dict[str, Any]]
"""The arguments without a default, which are passed by position, and the others."""


def construction(module: nn.Module) -> str:
    """Code such as `nn.Conv2d(1, 6, (3, 3), padding='same')`, which omits arguments equal to torch's defaults.

    The arguments are tried out. If they do not reproduce the module, because someone changed it, that is an error.
    """
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind:
        raise ModelError(f"a {kind.__name__} is not one of torch.nn's modules, so it cannot be written as code")
    required, chosen = _arguments(module)
    if not _makes(module, required.values(), chosen):
        raise ModelError(f"this {kind.__name__} holds more than its arguments say, so it cannot be written as code")
    for name in list(chosen):
        fewer = {key: value for key, value in chosen.items() if key != name}
        chosen = fewer if _makes(module, required.values(), fewer) else chosen
    written = [*map(_text, required.values()), *(f"{name}={_text(value)}" for name, value in chosen.items())]
    return f"nn.{kind.__name__}({', '.join(written)})"


def _makes(module: nn.Module, required: Iterable[Any], optional: Mapping[str, Any]) -> bool:
    """Whether these arguments make a module that computes the same, given the same weights."""
    try:
        # On "meta", weights take no memory. A warning is a reason to write an argument out.
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("error")
            made = type(module)(*required, **optional)
    except Exception:  # whatever the error, the module was not made this way
        return False
    return dict(_facts(module)) == dict(_facts(made))


def _facts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Everything that defines a module and its children, except the values of their weights."""
    for name, value in module.state_dict().items():
        yield name, value.shape
    for prefix, child in module.named_modules():
        yield f"{prefix}:", type(child)
        for name, value in vars(child).items():
            known = not name.startswith("_") and name not in ("training", "enable_nested_tensor")
            hook = name in ("_forward_hooks", "_forward_pre_hooks") and value
            if hook or (known and (_is_plain(value) or (callable(value) and not isinstance(value, nn.Module)))):
                yield f"{prefix}.{name}", list(value) if hook else value


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, (tuple, list)) and all(map(_is_plain, value)))


def _arguments(module: nn.Module) -> Arguments:
    """Read the arguments from the module's attributes of the same names, or from where torch keeps them instead."""
    kind = type(module)
    if kind in READ_BACK:
        return READ_BACK[kind](module)
    required, optional = dict[str, Any](), dict[str, Any]()
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in ("device", "dtype") or name.startswith("_") or not hasattr(module, name):
            continue
        value = getattr(module, name)
        value = isinstance(value, Tensor) if name == "bias" and not isinstance(value, bool) else value
        (required if parameter.default is parameter.empty else optional)[name] = value
    return required, optional


def _recurrent(module: Any) -> Arguments:
    names = (*RECURRENT, *{nn.RNN: ["nonlinearity"], nn.LSTM: ["proj_size"], nn.GRU: []}[type(module)])
    required = {name: getattr(module, name) for name in ("input_size", "hidden_size")}
    return required, {name: getattr(module, name) for name in names}


def _attention(module: Any) -> Arguments:
    optional = {name: getattr(module, name) for name in ("dropout", "add_zero_attn", "kdim", "vdim", "batch_first")}
    optional |= {"bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
    return {"embed_dim": module.embed_dim, "num_heads": module.num_heads}, optional


def _transformer_layer(module: Any) -> Arguments:
    attention, first = module.self_attn, module.linear1
    return {"d_model": attention.embed_dim, "nhead": attention.num_heads}, {
        "dim_feedforward": first.out_features,
        "dropout": module.dropout.p,
        "activation": module.activation,
        "layer_norm_eps": module.norm1.eps,
        "batch_first": attention.batch_first,
        "norm_first": module.norm_first,
        "bias": first.bias is not None,
    }


def _transformer(module: Any) -> Arguments:
    optional = {"norm": module.norm}
    if isinstance(module, nn.TransformerEncoder):
        # torch warns if nested tensors are requested but not possible.
        optional |= {"enable_nested_tensor": module.use_nested_tensor, "mask_check": module.mask_check}
    return {"layer": module.layers[0], "num_layers": module.num_layers}, optional


READ_BACK: dict[type[nn.Module], Callable[[Any], Arguments]] = {
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), _recurrent),
    nn.MultiheadAttention: _attention,
    **dict.fromkeys((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer), _transformer_layer),
    **dict.fromkeys((nn.TransformerEncoder, nn.TransformerDecoder), _transformer),
}


def _text(value: Any) -> str:
    """An argument as code."""
    if isinstance(value, nn.Module):
        return construction(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if _is_plain(value):
        return repr(value)
    name = getattr(value, "__name__", "")
    if getattr(F, name, None) is value:
        return f"nn.functional.{name}"
    raise ModelError(f"{value!r} is not part of torch, so it cannot be written as code")
