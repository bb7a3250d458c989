"""The server's work in a simulation and in a deployment: update, evaluate, and the finished model."""

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fedprior.core import trees
from fedprior.core.batch_norm import MEAN, VARIANCE, find_norms, forget
from fedprior.core.ensemble import Ensemble
from fedprior.core.errors import DivergedError
from fedprior.core.federated import FederatedData
from fedprior.core.late import late
from fedprior.core.metrics import Judged, Measures, judge, layer_sparsity, local_scores, of_clients, over_clients
from fedprior.core.optimisers import TreeOptimiser
from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import Share
from fedprior.core.workers import Workers
from fedprior.em import Algorithm, protocol
from fedprior.em.folding import Sums

Record = dict[str, Any]
SCORES = ("global_", "local_", "unseen_", "newcomer_")
"""How what is measured on test examples begins."""


class Evaluation(NamedTuple):
    """What an evaluation adds to a round's record, and what it finds of every client."""

    record: Record
    clients: dict[str, Tensor]


def update(
    algorithm: Algorithm,
    server: Tree,
    uploads: Tree | Sums,
    optimiser: TreeOptimiser | None,
    share: Share,
    number: int,
    rate: float | Tensor = 1.0,
    fine: Tensor | None = None,
) -> protocol.Conclusion:
    """Take the M-step of a round. If the new state is not finite, restore the optimiser and raise an error."""
    moments = optimiser.state() if optimiser else {}
    if isinstance(uploads, Sums):
        found = protocol.conclude_folded(algorithm, server, uploads, optimiser, share, rate)
    else:
        found = protocol.conclude(algorithm, server, uploads, optimiser, share, rate, fine)
    if bool(found.sound):
        return found
    if optimiser:
        optimiser.load_state(moments)
    raise server_diverged(number)


def evaluate(
    algorithm: Algorithm,
    state: Tree,
    measures: Measures,
    scores: Mapping[str, Tensor],
    workers: Workers,
    data: FederatedData | None,
    unseen: Judged | None = None,
) -> Evaluation:
    """Global and local scores, and the size of the current server. Global scores need test examples.

    `unseen` is what is known of clients that never took part.
    """
    prior = algorithm.prior
    server = prior.prune(state)
    models = algorithm.predict(server)
    judged = judge(workers, measures, algorithm.ship(server), data)
    clients = of_clients(scores, judged.clients)
    apart = unseen or Judged({}, {})
    record = {
        **judged.scores,
        **local_scores(scores),
        **over_clients(clients),
        **apart.scores,
        "sparsity": 1 - prior.effective_parameters(server) / trees.count(models),
        **layer_sparsity(models),
        **prior.tally(server),
    }
    # Each client's place is filled by one of the two.
    every = {name: values.where(~values.isnan(), apart.clients.get(name, values)) for name, values in clients.items()}
    return Evaluation(record, every)


def totals(algorithm: Algorithm, state: Tree, records: Sequence[Record]) -> Record:
    """A summary's values for all rounds together, for the last one and, as `…_late`, for the last 5%."""
    server, last = algorithm.prior.prune(state), records[-1]
    return {
        "rounds": len(records),
        **{name: value for name, value in last.items() if name.startswith(SCORES)},
        **{f"{name}_late": late(records, name) for name in ("global_accuracy", "local_accuracy") if name in last},
        **({"epsilon": last["epsilon"]} if "epsilon" in last else {}),
        "bytes_up": sum(record["bytes_up"] for record in records),
        "bytes_down": sum(record["bytes_down"] for record in records),
        "sparsity": last.get("sparsity"),
        "parameters": trees.count(algorithm.predict(server)),
        "effective_parameters": algorithm.prior.effective_parameters(server),
    }


def final_model(algorithm: Algorithm, state: Tree, module: nn.Module, class_dim: int | None = -1) -> nn.Module:
    """The user's module with the server's pruned weights, or an ensemble if the server has several models."""
    models = algorithm.ship(algorithm.prior.prune(state))
    members = []
    for k in range(len(next(iter(models.values())))):
        member = copy.deepcopy(module)
        members.append(with_values(member, trees.row(models, k)))
    return members[0] if len(members) == 1 else Ensemble(members, class_dim).eval()


def with_values(module: nn.Module, values: Params) -> nn.Module:
    """A module with these weights and statistics; without statistics, its norms use the batch's."""
    module.load_state_dict(values, strict=False)
    for norm in find_norms(module):
        if norm.name + MEAN not in values:
            forget(module, norm)
    return module.eval()


def learned(module: nn.Module) -> Params:
    """What a module has learned: its parameters, and its norms' statistics."""
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    buffers = dict(module.named_buffers())
    return parameters | {n.name + part: buffers[n.name + part] for n in find_norms(module) for part in (MEAN, VARIANCE)}


def floored(state: Tree) -> set[str]:
    """The layers in which the floor kept units open."""
    return {layer for layer, acted in state.get("floored", {}).items() if bool((acted > 0).any())}


def clip_of(server: Tree) -> Record:
    """What the record of a round says about its clip, if that is not the same in all rounds."""
    return {"clip": float(server["clip"]["norm"])} if "clip" in server else {}


def left_out(clients: Sequence[int], apart: Sequence[float], bound: float) -> list[Record]:
    """The faults of clients whose uploads were not used: too far from the server's state, or not finite."""
    pairs = zip(clients, apart, strict=True) if bound else ()
    return [{"client": client, "what": _too_far(times)} for client, times in pairs if not times <= bound]


STILL = 3
"""After so many rounds in which nobody counted, the user is told."""


def stands_still(records: Sequence[Record], cohort: int) -> bool:
    """Whether nobody of a cohort has counted in the last rounds, and that has just become so many."""
    nobody = [len(record.get("faults", ())) >= cohort for record in records[-STILL - 1 :]]
    return all(nobody[-STILL:]) and (len(nobody) == STILL or (len(nobody) > STILL and not nobody[0]))


def left_out_often(records: Sequence[Record]) -> list[int]:
    """The clients of the last record whose uploads have now been left out in so many rounds for being far away."""
    if not (latest := _far(records[-1])):
        return []
    counts = Counter(client for record in records for client in _far(record))
    return sorted(client for client in latest if counts[client] == STILL)


def _far(record: Record) -> set[int]:
    overflow = _too_far(math.inf)
    return {fault["client"] for fault in record.get("faults", ()) if "client" in fault and fault["what"] != overflow}


def _too_far(times: float) -> str:
    if math.isinf(times):
        return "its upload or its loss is not finite, or as good as: left out"
    return f"its upload counts as {times:.3g} times as far from the server's state as usual: left out"


def client_diverged(client: int, number: int) -> DivergedError:
    """The error for a client whose numbers overflow."""
    return DivergedError(
        f"client {client} diverged in round {number}: its loss or weights are no longer finite. "
        "The state before that round is kept; lower the learning rates"
    )


def server_diverged(number: int) -> DivergedError:
    """The error for a server whose numbers overflow."""
    return DivergedError(
        f"the server diverged in round {number}: its weights or thresholds are no longer finite. "
        "The state before that round is kept; lower the server's learning rates"
    )
