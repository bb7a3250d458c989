"""A model as a pure function of its parameters."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprior.core import batch_norm
from fedprior.core.batch_norm import COUNT, MEAN, VARIANCE, Norm
from fedprior.core.dropout import KeyedDropout
from fedprior.core.inputs import ModelInputs, Several
from fedprior.core.operations import batched, operation
from fedprior.core.trees import Params

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs and targets to one loss per example. Several per example, such as one per token, are averaged."""
Metric = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs and targets to one number per example, or to its mean over the examples."""
Given = ModelInputs | Mapping[str, Tensor]
"""What a module reads: one tensor, or its parameters by name."""
IGNORED = -100
"""torch's mark for positions in a sequence of targets that do not count, such as padding."""


def class_dim(outputs: Tensor, targets: Tensor) -> int | None:
    """The dimension with one logit per class: after the batch, torch's convention, or last. None without classes.

    It is also None if both would fit, for a sequence as long as the number of classes: that is ambiguous.
    """
    if targets.is_floating_point() or targets.is_complex() or outputs.dim() != targets.dim() + 1:
        return None
    places = {dim for dim in (1, targets.dim()) if outputs.shape[:dim] + outputs.shape[dim + 1 :] == targets.shape}
    return places.pop() if len(places) == 1 and all(outputs.shape[dim] > 1 for dim in places) else None


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The default loss: softmax cross-entropy per example; for a sequence, its mean over the positions."""
    if targets.dim() > 1 and (dim := class_dim(outputs, targets)) is not None:
        each = F.cross_entropy(outputs.movedim(dim, 1), targets, reduction="none", ignore_index=IGNORED)
        return each.flatten(1).sum(1) / (targets != IGNORED).flatten(1).sum(1).clamp(min=1)
    return class_losses(outputs, targets)


@operation
def class_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Softmax cross-entropy of each example, one logit per class."""
    return F.cross_entropy(outputs, targets, reduction="none")


@operation
def routed(x: Tensor) -> AbstractContextManager[Any]:
    """Within this context a model's calls on tensors like `x` go where they are fastest; without any, to torch."""
    return nullcontext()


@dataclass(frozen=True)
class Whole:
    """A metric of a whole set of examples, which is not a mean over them: a calibration error, for example."""

    parts: Metric
    """Maps outputs and targets to what must be known of each example, [examples, …]."""
    join: Callable[[Tensor, Tensor], Tensor]
    """Maps these parts, and the weight of each example, to one number. Examples of weight zero are padding."""


@dataclass(frozen=True)
class Network:
    """An `nn.Module`, an example input (without the batch dimension), and its loss."""

    module: nn.Module
    example: ModelInputs
    loss: Loss = cross_entropy
    metrics: Mapping[str, Metric | Whole] = field(default_factory=dict)
    """Further measures of its outputs, by name."""
    tied: dict[str, str] = field(init=False)
    """Maps each further name of a shared parameter to its first name."""
    norms: tuple[Norm, ...] = field(init=False)
    """The layers that normalise by their batch's statistics in training and by stored ones in evaluation."""

    def __post_init__(self) -> None:
        first = {id(p): name for name, p in self.module.named_parameters()}
        slots = (
            (f"{prefix}.{name}" if prefix else name, p)
            for prefix, module in self.module.named_modules()
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        )
        tied = {slot: first[id(p)] for slot, p in slots if slot != first[id(p)]}
        object.__setattr__(self, "tied", tied)
        object.__setattr__(self, "norms", batch_norm.find_norms(self.module))

    def __repr__(self) -> str:
        """Show kind and size; print `module` to see the layers."""
        return f"Network({type(self.module).__name__}, {sum(p.numel() for p in self.module.parameters()):,} parameters)"

    def params(self) -> Params:
        """A copy of the module's own parameters."""
        return {name: p.detach().clone() for name, p in self.module.named_parameters() if p.requires_grad}

    def statistics(self) -> Params:
        """A copy of the module's initial statistics and of the number of batches behind them, 0 if there are none."""
        buffers = dict(self.module.named_buffers())
        found = {
            norm.name + part: buffers[norm.name + part].clone() for norm in self.norms for part in (MEAN, VARIANCE)
        }
        if not found:
            return {}
        some = next(iter(found.values()))
        known = [buffers.get(f"{norm.name}num_batches_tracked") for norm in self.norms]
        count = min(0.0 if seen is None else float(seen) for seen in known)
        return {**found, COUNT: torch.full((), count, dtype=some.dtype, device=some.device)}

    def predict(self, params: Params, x: Given, weight: Tensor | None = None) -> Tensor:
        """The module's outputs with these parameters, without dropout.

        If the parameters include statistics, those are used. If not, the statistics of the batch are, without its
        padding, which has weight zero.
        """
        # torch's fast paths for attention in evaluation have no rule for `vmap`; an active mode disables them.
        vectorised = KeyedDropout(None) if batched(_some(x)) else nullcontext()
        with _mode(self.module, training=False), vectorised:
            if not self.uses_batch(params):
                return self._run(params, x)
            with batch_norm.BatchNorm(self._names(), weight):
                return self._run(params, x)

    def uses_batch(self, params: Params) -> bool:
        """Whether a prediction with these parameters depends on the other examples of its batch."""
        return bool(self.norms) and self.norms[0].name + MEAN not in params

    def training_loss(self, params: Params, x: Given, y: Tensor, weight: Tensor | None, key: Tensor) -> Tensor:
        """The mean loss of a batch. Examples of weight zero are padding."""
        return _mean(self._training_losses(params, x, y, weight, key)[0], weight)

    def training_with_statistics(
        self, params: Params, x: Given, y: Tensor, weight: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Params]:
        """The same, and the batch's statistics with unbiased variances, as in running averages."""
        losses, norm = self._training_losses(params, x, y, weight, key)
        return _mean(losses, weight), self._found(norm, unbiased=True)

    def training_losses(self, params: Params, x: Given, y: Tensor, key: Tensor) -> Tensor:
        """One loss per example, with dropout drawn from the key."""
        return self._training_losses(params, x, y, None, key)[0]

    def _training_losses(
        self, params: Params, x: Given, y: Tensor, weight: Tensor | None, key: Tensor
    ) -> tuple[Tensor, batch_norm.BatchNorm]:
        with _mode(self.module, training=True):
            for norm in self._modules():  # in training mode each would count its batches in a buffer
                norm.eval()
            # Both modes are always on, because `forward` may call either function directly. They cost very little.
            with KeyedDropout(key), batch_norm.BatchNorm(self._names(), weight) as mode:
                outputs = self._run(params, x)
        return self.losses(outputs, y), mode

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One loss per example."""
        losses = self.loss(outputs, y)
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses

    def evaluation_loss(self, params: Params, x: Given, y: Tensor, weight: Tensor | None) -> Tensor:
        """The same without dropout."""
        return _mean(self.losses(self.predict(params, x, weight), y), weight)

    def measure(self, params: Params, x: Given, weight: Tensor | None) -> Params:
        """The statistics of each norm's input: `mean` and `variance`, with all layers in one vector.

        Earlier norms use the batch's statistics. If they used stored ones, a layer's report would depend on how well
        the layers before it were known one round ago; in a network of twenty layers that does not settle.
        """
        with _mode(self.module, training=False), batch_norm.BatchNorm(self._names(), weight) as mode:
            self._run(params, x)
        return self._found(mode)

    def _names(self) -> dict[int, str]:
        """Maps the identity of each running mean to its layer's name."""
        buffers = dict(self.module.named_buffers()) if self.norms else {}
        return {id(buffers[norm.name + MEAN]): norm.name for norm in self.norms}

    def _modules(self) -> list[nn.Module]:
        return [m for m in self.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def _found(self, mode: batch_norm.BatchNorm, unbiased: bool = False) -> Params:
        """The statistics that a forward pass has found, with all layers in one vector."""
        if not self.norms:
            return {}
        buffers, means, variances = dict(self.module.named_buffers()), [], []
        for norm in self.norms:
            # A layer that did not run, such as the auxiliary head of some models, keeps its initial statistics.
            unused = buffers[norm.name + MEAN], buffers[norm.name + VARIANCE], None
            mean, variance, values = mode.found.get(norm.name, unused)
            means.append(mean)
            variances.append(variance * mode.correction(values) if unbiased and values is not None else variance)
        return {"mean": torch.cat(means), "variance": torch.cat(variances)}

    def _run(self, params: Params, x: Given) -> Tensor:
        # torch's tie_weights leaves this call's values in a module that is registered under two names
        # (pytorch#164759), so we pass tied parameters by name.
        tied = {slot: params[name] for slot, name in self.tied.items() if name in params}
        args, named = ((x,), {}) if isinstance(x, Tensor) else ((), dict(_parts(x)))
        with routed(_some(x)):
            out: Tensor = torch.func.functional_call(self.module, {**params, **tied}, args, named, tie_weights=False)
        return out


def _parts(x: Given) -> Mapping[str, Tensor]:
    """A module's inputs by name; a single one has none."""
    return x.parts if isinstance(x, Several) else {"": x} if isinstance(x, Tensor) else x


def _some(x: Given) -> Tensor:
    """One tensor of the inputs: where they are, and whether there is one for each client, is the same for all."""
    return next(iter(_parts(x).values()))


@contextmanager
def _mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a module in training or evaluation mode, and restore it afterwards: it belongs to the user."""
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, was in before:
            part.training = was


def _mean(losses: Tensor, weight: Tensor | None) -> Tensor:
    return losses.mean() if weight is None else (losses * weight).sum() / weight.sum().clamp(min=1)
