"""Write a network as a Python file: readable, plain torch that loads without fedprior."""

import inspect
import re
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedprior.core.errors import ModelError
from fedprior.core.trees import Params
from fedprior.trained.compact.construct import construction
from fedprior.trained.compact.measure import tied
from fedprior.trained.compact.norm import PrunedNorm

TEMPLATE = '''"""{about}

    from model import load
    model = load()                # an ordinary nn.Module, in evaluation mode
    outputs = model(inputs)       # inputs of shape {shape}
"""

{imports}from pathlib import Path

import torch
from safetensors.torch import load_model
from torch import Tensor, nn
{extra}

class Model(nn.Module):
    """The network, layer by layer."""

    def __init__(self) -> None:
        super().__init__()
{layers}

{forward}


def load(folder: Path | str = Path(__file__).parent) -> Model:
    """The network with its weights from model.safetensors."""
    model = Model(){dtype}
    load_model(model, Path(folder) / "model.safetensors")
    return model.eval()
'''


# Names in fx's code that are not Python builtins.
IMPORTS = {"inf": "from math import inf", "nan": "from math import nan", "device": "from torch import device"}


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, PrunedNorm) or super().is_leaf_module(m, module_qualified_name)


def in_layers(module: nn.Module) -> tuple[nn.Module, fx.Graph]:
    """Trace the forward pass as calls of the module's layers."""
    try:
        return module, _Tracer().trace(module)
    except Exception as error:
        raise ModelError(
            f"the model's forward cannot be traced, so it cannot be written as code ({type(error).__name__}: {error}). "
            "Remove control flow that depends on data"
        ) from error


def to_source(module: nn.Module, graph: fx.Graph, example: Tensor, about: str) -> tuple[str, Params]:
    """The text of `model.py` and the weights that go with it."""
    root, lines = _flatten(module, graph)
    imports, forward = _forward(fx.GraphModule(root, graph))
    norms = any(isinstance(m, PrunedNorm) for m in root.modules())
    dtypes = {p.dtype for p in module.parameters()} - {torch.float32}
    shared = tied(root)
    lines += [f"self.{_path(name)} = self.{_path(first)}" for name, first in shared.items()]
    text = TEMPLATE.format(
        about=_quoted(about),
        shape=("batch", *example.shape),
        imports="".join(f"{line}\n" for line in imports),
        extra="\n\n" + inspect.getsource(PrunedNorm).rstrip() + "\n" if norms else "",
        layers="\n".join(f"        {line}" for line in lines),
        forward="\n".join(f"    {line}".rstrip() for line in forward.splitlines()),
        dtype=f".to({dtypes.pop()})" if dtypes else "",
    )
    return text, {name: value for name, value in root.state_dict().items() if name not in shared}


def _path(name: str) -> str:
    """A parameter's name as code; modules in a list are indexed by number."""
    return re.sub(r"\.(\d+)(?=\.)", r"[\1]", name)


def _quoted(text: str) -> str:
    """Make a line safe for a docstring: a run's label may hold anything, and exported code is executed."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line.replace("\\", "\\\\").replace('"', '\\"')


def _flatten(module: nn.Module, graph: fx.Graph) -> tuple[nn.Module, list[str]]:
    """Give everything that the graph uses a name without dots; return it with the lines that build it."""
    root, lines, names = nn.Module(), [], dict[str, str]()
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        target = str(node.target)
        if target not in names:
            names[target] = _free_name(target, set(names.values()))
            line = _add(root, names[target], _lookup(module, target))
            lines.append(f"self.{names[target]} = {line}" if not line.startswith("self.") else line)
        node.target = names[target]
    return root, lines


def _free_name(target: str, taken: set[str]) -> str:
    name = re.sub(r"\W", "_", target)
    name = f"layer_{name}" if name[0].isdigit() or hasattr(nn.Module, name) or name == "load" else name
    while name in taken:
        name += "_"
    return name


def _lookup(module: nn.Module, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _add(root: nn.Module, name: str, value: Any) -> str:
    """Put a module, parameter or buffer into the root; return the code that makes it."""
    if isinstance(value, nn.Module):
        root.add_module(name, value)
        return repr(value) if isinstance(value, PrunedNorm) else construction(value)
    if isinstance(value, nn.Parameter):
        root.register_parameter(name, value)
        return f"nn.Parameter(torch.zeros({tuple(value.shape)}, dtype={value.dtype}))"
    root.register_buffer(name, value)
    return f'self.register_buffer("{name}", torch.zeros({tuple(value.shape)}, dtype={value.dtype}))'


def _forward(graph: fx.GraphModule) -> tuple[list[str], str]:
    """The import lines that the forward function needs, and its text."""
    code = graph.graph.python_code("self")
    used = [
        name
        for name, value in code.globals.items()
        if value is not torch and re.search(rf"(?<![.\w]){name}\b", code.src)
    ]
    foreign = [name for name in used if name not in IMPORTS]
    if foreign:
        raise ModelError(f"the model calls {foreign[0]!r}, which is not part of torch, so it cannot be written as code")
    # fx frees each value after its last use; drop that noise.
    lines = [re.sub(r";  (\w+ = )+None$", "", line) for line in code.src.strip().splitlines()]
    text = "\n".join(line for line in lines if line.strip())
    text = text.replace(" : torch.Tensor", ": Tensor").replace("-> torch.Tensor", "-> Tensor")
    return [IMPORTS[name] for name in sorted(used)], text
