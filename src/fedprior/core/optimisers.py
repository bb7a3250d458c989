"""torch.optim on trees: any of its optimisers, for one client, a stacked cohort, or the server.

Almost all of torch's optimisers act element by element. One step on parameters stacked over a cohort is then one step
of each client's own optimiser; the same holds for the servers of stacked runs. The exceptions are listed here, and with
them the simulator trains clients in turn.
"""

import ast
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedprior.core.errors import SettingError, described
from fedprior.core.trees import Params, Tree, copy_all
from fedprior.core.uncompiled import take_step
from fedprior.core.yogi import Yogi

NOT_ELEMENTWISE = {"Adafactor", "Muon"}
FUSED = {"SGD", "Adam", "AdamW"}
"""Optimisers whose step needs only one or two launches on a GPU, whatever the number of tensors."""
UNUSABLE = {"LBFGS": "it needs to re-evaluate its loss", "SparseAdam": "it needs sparse gradients"}


def _kind(name: str) -> Any:
    """The optimiser of that name, torch's or ours, or None."""
    return Yogi if name == "Yogi" else getattr(torch.optim, name, None)


@dataclass(frozen=True)
class Optimiser:
    """The name and settings of an optimiser in torch.optim: `Optimiser("Adam", {"lr": 1e-3})`."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise SettingError(
                f"an optimiser is named, as Optimiser('Adam', {{'lr': 0.001}}); got {described(self.name)}"
            )
        kind = _kind(self.name)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or self.name == "Optimizer":
            raise SettingError(f"torch.optim has no optimiser {self.name!r}")
        if self.name in UNUSABLE:
            raise SettingError(f"{self.name} cannot be used here: {UNUSABLE[self.name]}")
        for key, value in self.settings.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise SettingError(f"{self.name}: {key} must be finite, got {value}")
        try:
            trial = torch.zeros(1, 1)
            optimiser = self.build([trial])
            trial.grad = torch.ones_like(trial)
            take_step(optimiser)  # some settings, such as a rate too large for float32, fail only here
        except SettingError:
            raise
        except Exception as error:  # torch raises many kinds of errors: Adam's betas=(0.9,) is an IndexError
            raise SettingError(f"{self}: {error}") from error

    @classmethod
    def preset(cls, name: str, **settings: Any) -> "Optimiser":
        """A default of this package, not checked: a test does it once, an import would do it every time."""
        made = object.__new__(cls)
        object.__setattr__(made, "name", name)
        object.__setattr__(made, "settings", settings)
        return made

    @classmethod
    def parse(cls, text: str) -> "Optimiser":
        """Read a call such as `Adam(lr=0.001, betas=(0.9, 0.99))`."""
        try:
            call = ast.parse(text.strip(), mode="eval").body
            if isinstance(call, ast.Name):
                return cls(call.id)
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                raise ValueError(text)
            settings = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
            if len(settings) < len(call.keywords):
                raise ValueError(text)
            return cls(call.func.id, settings)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise SettingError(f"an optimiser is written like SGD(lr=0.05), got {text!r}") from error

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.settings.items())})"

    def build(self, tensors: list[Tensor]) -> torch.optim.Optimizer:
        """Build the torch optimiser for these tensors."""
        try:
            built: torch.optim.Optimizer = _kind(self.name)(tensors, **self._for_device(tensors), **self.settings)
        except ValueError as error:  # Muon, for example, takes only matrices
            raise SettingError(f"{self}: {error}") from error
        return built

    def _for_device(self, tensors: list[Tensor]) -> dict[str, Any]:
        """On a GPU, keep even the step count there, so that nothing waits for it and a CUDA graph can hold it."""
        if not tensors[0].is_cuda:
            return {}
        knows, chosen = inspect.signature(_kind(self.name)).parameters, set(self.settings)
        options = {"capturable": True} if "capturable" in knows and "capturable" not in chosen else {}
        if self.name in FUSED and not chosen & {"fused", "foreach", "differentiable"}:
            options["fused"] = True
        return options

    @property
    def joins(self) -> bool:
        """Whether one long tensor is faster than many short ones and gives the same result."""
        return self.name not in FUSED | NOT_ELEMENTWISE

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold its step, which must then not count steps on the host."""
        return self.name in {"SGD", "Yogi"} or "capturable" in inspect.signature(_kind(self.name)).parameters

    @property
    def lr(self) -> float:
        """The step size."""
        return float(self.build([torch.zeros(1, 1)]).defaults["lr"])

    def path(self, steps: Tensor) -> Tensor:
        """How far `steps` steps descend a slope of one; with momentum that is more than lr · steps.

        With momentum μ and dampening d the k-th step is b_k = a + (1 − a) μᵏ⁻¹ times lr, a = (1 − d)/(1 − μ).
        """
        given = self.build([torch.zeros(1, 1)]).defaults
        momentum = float(given["momentum"]) if self.name == "SGD" else 0.0
        if momentum == 0:
            return steps * float(given["lr"])
        total: Tensor
        if momentum == 1:
            total = steps + (1 - given["dampening"]) * steps * (steps - 1) / 2
        else:
            a = (1 - given["dampening"]) / (1 - momentum)
            total = a * steps + (1 - a) * (1 - momentum**steps) / (1 - momentum)
        return (steps + momentum * total if given["nesterov"] else total) * float(given["lr"])


class TreeOptimiser:
    """One torch optimiser per section of a tree, on copies of its tensors. Sections without one do not change.

    If that is faster, the tensors of a section are views of one long tensor, which is then optimised. `rows` is the
    number of stacked trees.
    """

    def __init__(self, optimisers: Mapping[str, Optimiser], tree: Tree, rows: int = 1) -> None:
        self.rows = rows
        self.values: Tree = {}
        self.optimisers: dict[str, torch.optim.Optimizer] = {}
        self.long: dict[str, Tensor] = {}
        for section, optimiser in optimisers.items():
            if section not in tree:
                raise SettingError(f"there is an optimiser for {section!r}, but the variables are {', '.join(tree)}")
            values = {name: value.detach() for name, value in tree[section].items()}
            if optimiser.joins and len(values) > 1 and len({(v.dtype, v.device) for v in values.values()}) == 1:
                self.long[section] = _join(list(values.values()), rows)
                values = _part(self.long[section], values)
            else:
                values = {name: value.clone() for name, value in values.items()}
            self.values[section] = values
            over = [self.long[section]] if section in self.long else list(values.values())
            self.optimisers[section] = optimiser.build(over)
        self.rates = {section: built.defaults["lr"] for section, built in self.optimisers.items()}

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the optimisers' own rates by this factor from now on. A captured graph needs it as a tensor."""
        for section, optimiser in self.optimisers.items():
            for group in optimiser.param_groups:
                group["lr"] = self.rates[section] * factor

    def step(self, grads: Tree) -> None:
        """Take one step of descent, in place."""
        for section, optimiser in self.optimisers.items():
            slopes = [grads[section][name] for name in self.values[section]]
            if section in self.long:
                over, slopes = [self.long[section]], [_join(slopes, self.rows)]
            else:
                over = list(self.values[section].values())
            for value, slope in zip(over, slopes, strict=True):
                value.grad = _laid_out(slope, value)
            take_step(optimiser)
            for value in over:
                value.grad = None

    def load(self, tree: Tree) -> None:
        """Replace the values; the optimisers keep their moments."""
        for section, values in self.values.items():
            copy_all(list(values.values()), [tree[section][name] for name in values])

    def state(self) -> dict[str, dict[str, Any]]:
        """A copy of each optimiser's moments: {section: {"exp_avg/fc.bias": tensor or number}}."""
        return {
            section: {
                path: value.clone() if isinstance(value, Tensor) else value
                for path, value in self._moments(section).items()
            }
            for section in self.optimisers
        }

    def _moments(self, section: str) -> dict[str, Any]:
        """The moments themselves, by name, or views of them if tensors are joined."""
        values, moments = self.values[section], self.optimisers[section].state_dict()["state"]
        if section not in self.long:
            names = list(values)
            return {f"{key}/{names[i]}": value for i, each in moments.items() for key, value in each.items()}
        shape, found = self.long[section].shape, dict[str, Any]()
        for key, value in moments.get(0, {}).items():
            joined = isinstance(value, Tensor) and value.shape == shape
            pieces = _part(value, values) if joined else dict.fromkeys(values, value)
            found |= {f"{key}/{name}": piece for name, piece in pieces.items()}
        return found

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """The inverse of `state`."""
        for section, optimiser in self.optimisers.items():
            names = list(self.values[section])
            moments: dict[int, dict[str, Any]] = {}
            for path, value in state.get(section, {}).items():
                key, name = path.split("/", 1)
                moments.setdefault(names.index(name), {})[key] = value
            if section in self.long and moments:
                moments = {0: {key: self._joined(section, key, moments) for key in moments[0]}}
            optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})

    def _joined(self, section: str, key: str, moments: dict[int, dict[str, Any]]) -> Any:
        """Join one moment of all tensors of a section for the long tensor."""
        values = list(self.values[section].values())
        each = [moments[i][key] for i in range(len(values))]
        alike = all(isinstance(v, Tensor) and v.shape == p.shape for v, p in zip(each, values, strict=True))
        return _join(each, self.rows) if alike and key != "step" else each[0]

    # ------------------------------------------------------------------ stacked runs
    def moments(self) -> list[Tensor]:
        """The optimisers' own tensors, not copies."""
        every = [value for section in self.optimisers for value in self._moments(section).values()]
        return list({id(value): value for value in every if isinstance(value, Tensor)}.values())

    def forget(self, rows: Tensor) -> None:
        """Undo the first step for the rows that are marked, as if its slope had been zero; for all rows, altogether."""
        if bool(rows.all()):
            for optimiser in self.optimisers.values():
                optimiser.state.clear()
        for value in self.moments():
            if value.dim():
                value.copy_(torch.where(rows.reshape(-1, *[1] * (value.dim() - 1)), 0.0, value))

    def load_rows(self, states: list[dict[str, dict[str, Any]]]) -> None:
        """Stack several runs' moments and load them; all runs share their step counts."""
        first = states[0]
        stacked = {
            section: {
                path: torch.stack([state[section][path] for state in states])
                if self._stacks(section, path, value, 1)
                else value
                for path, value in moments.items()
            }
            for section, moments in first.items()
        }
        if any(stacked.values()):
            self.load_state(stacked)

    def row(self, index: int, late: bool = False) -> dict[str, dict[str, Any]]:
        """One run's `state`; `late` if that run did not take the last step."""
        return {
            section: {
                path: value[index].clone()
                if self._stacks(section, path, value, 0)
                else value - 1
                if late and path.startswith("step/")
                else value
                for path, value in moments.items()
            }
            for section, moments in self.state().items()
        }

    def _stacks(self, section: str, path: str, value: Any, dims: int) -> bool:
        """Whether a moment has one number per parameter rather than one for all."""
        shape = self.values[section][path.split("/", 1)[1]].shape
        return isinstance(value, Tensor) and value.shape == shape[dims:] and not path.startswith("step/")


def _join(tensors: list[Tensor], rows: int) -> Tensor:
    """Concatenate all numbers of each row. Gradients of stacked gates already are columns of one such tensor."""
    if rows == 1:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    return torch.cat([tensor.reshape(rows, -1) for tensor in tensors], 1)


def _part(joint: Tensor, like: Params) -> Params:
    """The inverse of `_join`, as views."""
    rows = joint.shape[0] if joint.dim() > 1 else 1
    pieces = joint.split([value.numel() // rows for value in like.values()], -1)
    return {name: piece.view(value.shape) for (name, value), piece in zip(like.items(), pieces, strict=True)}


def _laid_out(grad: Tensor, value: Tensor) -> Tensor:
    """On a GPU, give a gradient its parameter's memory layout: only then can one launch handle them all."""
    if not value.is_cuda or grad.stride() == value.stride():
        return grad
    return torch.empty_like(value).copy_(grad)
