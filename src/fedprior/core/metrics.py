"""How a run is judged: by held-out loss, by accuracy if targets are classes, and by the user's own metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedprior.core.federated import FederatedData
from fedprior.core.inputs import ModelInputs, plain
from fedprior.core.network import IGNORED, Given, Metric, Network, Whole, class_dim, cross_entropy
from fedprior.core.options import nearest
from fedprior.core.probabilities import ECE, METRICS, PROBABILITIES, reliability
from fedprior.core.trees import Gates, Params
from fedprior.core.workers import Workers


class Measures(NamedTuple):
    """What can be measured for a network on some data."""

    names: tuple[str, ...]
    """`loss`, then `accuracy` if targets are classes, then the network's own metrics, then those asked for by name."""
    class_dim: int | None
    """The dimension of outputs that holds one logit per class, or None if targets are not classes."""
    functions: Mapping[str, Metric | Whole] = MappingProxyType({})
    """All but loss and accuracy."""

    @property
    def wholes(self) -> dict[str, Whole]:
        """Those of a whole set of examples; the others are means over them."""
        return {name: one for name in self.names if isinstance(one := self.functions.get(name), Whole)}

    @property
    def means(self) -> tuple[str, ...]:
        """Those that are means over examples."""
        return tuple(name for name in self.names if name not in self.wholes)


def measures(network: Network, data: FederatedData | None, names: Sequence[str] = ()) -> Measures:
    """Look at the outputs for one example. Without examples, assume an accuracy: only the clients know.

    `names` are further metrics; those of probabilities are left out where targets are not classes.
    """
    asked = named(names)
    if data is None or not len(data.y):
        dim: int | None = 1 if network.loss is cross_entropy else None
        return _measured(network, dim, True, asked)
    found: int | None = None
    if data.classes:
        device = next(network.module.parameters()).device
        with torch.no_grad():
            outputs = network.predict(network.params(), data.x[:1].to(device))
        found = class_dim(outputs, data.y[:1].to(device))
    return _measured(network, found, found is not None, asked)


def _measured(network: Network, dim: int | None, classes: bool, asked: Mapping[str, Metric | Whole]) -> Measures:
    fit = {name: one for name, one in asked.items() if classes or name not in PROBABILITIES}
    functions = {**network.metrics, **{name: one for name, one in fit.items() if name not in network.metrics}}
    return Measures(("loss", *(("accuracy",) if classes else ()), *functions), dim, functions)


def named(names: Sequence[str]) -> dict[str, Metric | Whole]:
    """The metrics of these names, or an error that names what there is."""
    for name in names:
        if name not in METRICS:
            raise nearest(name, METRICS, "metric")
    return {name: METRICS[name] for name in names}


def with_classes(network: Network, data: FederatedData) -> FederatedData:
    """Set the number of classes to that of the outputs, or to 0 if the targets are not such classes."""
    with torch.no_grad():
        outputs = network.predict(network.params(), data.x[:1])
    dim = class_dim(outputs, data.y[:1])
    targets = torch.cat([data.y, data.test_y]).flatten() if dim is not None else data.y
    targets = targets[targets != IGNORED] if data.y.dim() > 1 else targets
    fits = dim is not None and (len(targets) == 0 or (targets.min() >= 0 and targets.max() < outputs.shape[dim]))
    return replace(data, classes=outputs.shape[dim] if fits and dim is not None else 0)


def each(network: Network, what: Measures, outputs: Tensor, y: Tensor) -> Tensor:
    """Compute every measure of every example, shape [means, examples]; those of whole sets are not among them."""
    rows = {"loss": network.losses(outputs, y)}
    if what.class_dim is not None:
        rows["accuracy"] = _right(outputs, y, what.class_dim)
    own = {name: one for name, one in what.functions.items() if not isinstance(one, Whole)}
    rows |= {name: rows["loss"] if one is network.loss else one_each(one, outputs, y) for name, one in own.items()}
    return torch.stack([rows[name].double() for name in what.means])


def parts(what: Measures, outputs: Tensor, y: Tensor) -> Params:
    """What the measures of whole sets must know of each example."""
    return {name: whole.parts(outputs, y) for name, whole in what.wholes.items()}


def joined(what: Measures, sums: Tensor, known: Params, weight: Tensor) -> Tensor:
    """Every measure, times the number of examples, shape [measures]: from the `sums` of those that are means, and from
    the parts of the others. Examples of weight zero are padding."""
    found = dict(zip(what.means, sums.unbind(), strict=True))
    found |= {name: whole.join(known[name], weight).double() * weight.sum() for name, whole in what.wholes.items()}
    return torch.stack([found[name] for name in what.names])


def _right(outputs: Tensor, y: Tensor, dim: int) -> Tensor:
    """Whether each example is right; for a sequence, the share of its positions that are right."""
    right = outputs.argmax(dim) == y
    if y.dim() == 1:
        return right
    return (right & (y != IGNORED)).flatten(1).sum(1).double() / (y != IGNORED).flatten(1).sum(1).clamp(min=1)


def one_each(metric: Metric, outputs: Tensor, y: Tensor) -> Tensor:
    """Evaluate a metric for every example. One that returns a mean is called with one example at a time."""
    values = metric(outputs, y)
    if values.dim() == 0:
        values = vmap(lambda output, target: metric(output[None], target[None]))(outputs, y)
    return values.flatten(1).double().mean(1) if values.dim() > 1 else values


def sums(network: Network, what: Measures, params: Params, x: ModelInputs, y: Tensor, batch: int = 512) -> Tensor:
    """Every measure of these examples, times their number, shape [measures].

    A model that stores no statistics uses those of all the examples together.
    """
    if len(y) == 0:
        return torch.zeros(len(what.names), dtype=torch.float64, device=y.device)
    batch = len(y) if network.uses_batch(params) else batch
    total = torch.zeros(len(what.means), dtype=torch.float64, device=y.device)
    known: list[Params] = []
    with torch.no_grad():
        for start in range(0, len(y), batch):
            outputs = network.predict(params, x[start : start + batch])
            total += each(network, what, outputs, y[start : start + batch]).sum(1)
            known.append(parts(what, outputs, y[start : start + batch]))
    return joined(what, total, _cat(known), torch.ones(len(y), dtype=torch.float64, device=y.device))


def _cat(known: Sequence[Params]) -> Params:
    return {name: torch.cat([some[name] for some in known]) for name in known[0]}


def padded_sums(network: Network, what: Measures, models: Params, x: ModelInputs, y: Tensor, real: Tensor) -> Tensor:
    """The same for a cohort, [clients, measures]; `real` says which examples are not padding."""

    def of_one(params: Params, x: Given, y: Tensor, real: Tensor) -> tuple[Tensor, Params]:
        outputs = network.predict(params, x, real)
        return each(network, what, outputs, y), parts(what, outputs, y)

    with torch.no_grad():
        found, known = vmap(of_one)(models, plain(x), y, real)
        total = torch.where(real[:, None], found, 0.0).sum(2)
        return vmap(partial(joined, what))(total, known, real.double())


def ensemble(what: Measures, outputs: Tensor) -> Tensor:
    """Combine the outputs of stacked models: the logarithm of their mean probabilities, or simply their mean."""
    if len(outputs) == 1:
        return outputs[0]
    if what.class_dim is None:
        return outputs.mean(0)
    return outputs.log_softmax(what.class_dim + 1).logsumexp(0) - torch.log(torch.tensor(len(outputs)))


class Judged(NamedTuple):
    """What the server's model scores on test examples."""

    scores: dict[str, float]
    """Every measure on their union, as `global_NAME`, and the reliability diagram if there is a calibration error."""
    clients: dict[str, Tensor]
    """Loss and accuracy on each client's own, as `server_NAME`; empty without test examples."""


def judge(workers: Workers, what: Measures, models: Params, data: FederatedData | None, batch: int = 512) -> Judged:
    """Judge the server's model on the union of the clients' test sets. Stacked models act as an ensemble."""
    rows = data.test.distinct if data is not None else torch.zeros(0)
    if data is None or len(rows) == 0:
        return Judged({f"global_{name}": float("nan") for name in what.names}, {})
    device = next(iter(models.values())).device
    members = [{name: value[k] for name, value in models.items()} for k in range(len(next(iter(models.values()))))]

    def score(network: Network, chosen: Tensor) -> tuple[Tensor, Params]:
        x, y = data.test_x[chosen].to(device), data.test_y[chosen].to(device)
        with torch.no_grad():
            outputs = ensemble(what, torch.stack([network.predict(member, x) for member in members]))
            return each(network, what, outputs, y), parts(what, outputs, y)

    found, pieces = zip(*workers.map(score, rows.split(batch)), strict=True)
    known, weight = _cat(pieces), torch.ones(len(rows), dtype=torch.float64, device=device)
    total = joined(what, torch.stack([one.sum(1) for one in found]).sum(0), known, weight) / len(rows)
    scores = {f"global_{name}": value for name, value in zip(what.names, total.tolist(), strict=True)}
    if what.functions.get("ece") is ECE:
        scores |= reliability(known["ece"], weight)
    basic = [what.means.index(name) for name in BASIC if name in what.means]
    return Judged(scores, _by_client(what, torch.cat([one[basic] for one in found], 1).cpu(), data))


BASIC = ("loss", "accuracy")
"""What is known of every client."""


def _by_client(what: Measures, found: Tensor, data: FederatedData) -> dict[str, Tensor]:
    """Means over each client's test examples, from those of all distinct ones, [measures, examples]."""
    places = torch.searchsorted(data.test.distinct.cpu(), data.test.rows.cpu())
    until = torch.cat([found.new_zeros(len(found), 1), found[:, places].cumsum(1)], 1)
    edges, sizes = torch.from_numpy(data.test.offsets), torch.from_numpy(data.test.sizes)
    means = (until[:, edges[1:]] - until[:, edges[:-1]]) / sizes
    return {f"server_{name}": row for name, row in zip((n for n in BASIC if n in what.means), means, strict=True)}


def of_clients(scores: Mapping[str, Tensor], judged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every client's loss and accuracy: of the model it last sent and, as `server_NAME`, of the server's."""
    own = {name: scores[name] for name in BASIC if name in scores}
    blank = {f"server_{name}": torch.full_like(values, torch.nan) for name, values in own.items()}
    fits = all(judged[name].shape == blank[name].shape for name in judged)
    return {**own, **blank, **(judged if fits else {})}


def over_clients(columns: Mapping[str, Tensor]) -> dict[str, float]:
    """How unequal clients are: the mean over the worst tenth of them, and the standard deviation over all.

    Only those count that have a test set and, for models of their own, have had a turn.
    """
    found: dict[str, float] = {}
    for name, values in columns.items():
        known = values[~values.isnan()].sort(descending=name.endswith("loss")).values
        where = f"global_{name.removeprefix('server_')}" if name.startswith("server_") else f"local_{name}"
        found[f"{where}_worst"] = float(known[: -(-len(known) // 10)].mean())
        found[f"{where}_spread"] = float(known.std(correction=0)) if len(known) else float("nan")
    return found


def blank_scores(what: Measures, clients: int) -> dict[str, Tensor]:
    """The scores before any client has had a turn."""
    return {name: torch.full((clients,), torch.nan, dtype=torch.float64) for name in what.names}


def local_scores(scores: Mapping[str, Tensor]) -> dict[str, float]:
    """Means over the clients that have had a turn and have a test set, as `local_NAME`."""
    return {f"local_{name}": float(values.nanmean()) for name, values in scores.items()}


def layer_sparsity(models: Params) -> dict[str, float]:
    """The share of zeros in each layer's weights, as `sparsity/LAYER`; empty if there are none."""
    weights = {name: value for name, value in models.items() if value.dim() > 2}  # stacking adds one dimension
    gone = {
        f"sparsity/{name.removesuffix('.weight')}": float((value == 0).double().mean())
        for name, value in weights.items()
    }
    return gone if any(gone.values()) else {}


def disagreement(client_gates: Gates, server_gates: Gates) -> dict[str, float]:
    """Mean and maximum over gates and clients of the total variation |π − θ|; empty if there are no gates."""
    if not server_gates:
        return {}
    distance = torch.cat([(client_gates[layer] - theta).abs().reshape(-1) for layer, theta in server_gates.items()])
    return {"tv_mean": float(distance.mean()), "tv_max": float(distance.max())}
