"""What comes out of a run: the server's model, a client's own, their accuracy on any data, and files to ship."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fedprior.catalogue.data.images import Scale
from fedprior.catalogue.data.text import Alphabet
from fedprior.catalogue.tasks import Task
from fedprior.catalogue.tasks.base import examined
from fedprior.core.ensemble import Ensemble, Source
from fedprior.core.errors import DataError, ModelError, RunError, SettingError, described
from fedprior.core.inputs import ModelInputs
from fedprior.core.keys import Purpose, Turn
from fedprior.core.metrics import Measures, each, joined, parts
from fedprior.core.network import IGNORED, Network
from fedprior.em import Algorithm, protocol
from fedprior.engines.batches import ClientBatches
from fedprior.engines.build import build
from fedprior.engines.loop.round import Simulation
from fedprior.engines.server_state import final_model, learned, with_values
from fedprior.runs import checkpoint, early, start
from fedprior.runs.drive import Result
from fedprior.runs.folder import RunFolder, checksum
from fedprior.trained.compact.export_folder import Description, export_module
from fedprior.trained.compact.inputs import Reader
from fedprior.trained.compact.predict import outputs_of
from fedprior.trained.elsewhere import Examples, around, task_of


class Trained(NamedTuple):
    """A network from a run, and the data it was trained for."""

    module: nn.Module
    server: nn.Module
    """The same, unless the network is a client's own."""
    x: ModelInputs
    """Test inputs: the client's own for its own network, everyone's for the server's."""
    y: Tensor
    judged: tuple[Network, Measures]
    """The loss and the other measures by which it is judged."""
    title: str
    source: Source
    client: int | None
    scale: Scale | Alphabet | None


def trained(
    run: Result | Path | str,
    *,
    personalise: int | None = None,
    best: bool = False,
    task: Task | None = None,
    algorithm: Algorithm | None = None,
    call: str = "export",
) -> Trained:
    """Return a run's server network; with `best`, that of its best evaluation; with `personalise`, a client's own.

    For an unfinished run, this is the network of its last checkpoint. A task or algorithm of your own cannot be read
    from a run's config: pass it again, or pass the `Result`.
    """
    if best and personalise is not None:
        raise SettingError("a client's own model starts from the last server, not from the best: choose one of the two")
    if isinstance(run, Result):
        sim, about, scale = run.simulation, run.summary, run.scale
        if best and run.best is None:
            raise RunError("the run has not kept its best model: train with keep=best")
        server = copy.deepcopy(run.best if best and run.best else run.model)
        number = run.summary["best_round"] if best else sim.round
    else:
        with_state = personalise is not None
        about, scale, sim, server = _restored(RunFolder(Path(run)), task, algorithm, with_state, best, call)
        number = sim.round
    module = server if personalise is None else personal_model(sim, personalise)
    rows = sim.data.test.rows.unique() if personalise is None else sim.data.test[personalise]
    who = "" if personalise is None else f", client {personalise}'s own model"
    source = source_of(run, about, number)
    x, y = sim.data.test_x[rows].cpu(), sim.data.test_y[rows].cpu()
    judged = sim.network, sim.measures
    return Trained(
        module.cpu().eval(), server.cpu().eval(), x, y, judged, source.title + who, source, personalise, scale
    )


def source_of(run: Result | Path | str, about: Mapping[str, str], number: int) -> Source:
    """Tell a run after this many rounds from every other run."""
    records = run.records if isinstance(run, Result) else RunFolder(Path(run)).records()
    return Source(f"{about['task']}, {about['label']}, round {number}", checksum(records[:number]))


def _restored(
    folder: RunFolder, task: Task | None, algorithm: Algorithm | None, with_state: bool, best: bool, call: str
) -> tuple[dict[str, str], Scale | Alphabet | None, Simulation, nn.Module]:
    """Return what a run is about, its simulation (where it stopped, if `with_state`), and the server's network."""
    about, settings, task, algorithm = start.rebuild(folder, task, algorithm, call)
    start.check_data(folder, task)
    # Whatever device the run was trained on, the CPU is quick enough for one model.
    sim = build(algorithm, task.network, task.data, replace(settings, device="cpu", mode="in-turn", workers=1))
    kept = folder.best if best else folder.model
    if best and not kept.exists():
        raise RunError(f"{folder.path} has no best.safetensors: train with keep=best (--set keep=best)")
    # A run that was extended beyond its end keeps its old model until it is finished again.
    if best or (kept.exists() and folder.summary.exists() and not with_state):
        records = folder.records()
        found = early.best(records, settings.by) if best else None
        sim.round = found.round if found else len(records)
        return about, task.scale, sim, _with_weights(kept, task.network.module, sim.measures.class_dim)
    if not folder.checkpoint.exists():
        raise RunError(f"{folder.path} has no checkpoint.safetensors: there is no server state to start from")
    deployed = str(folder.read_config().get("flower", {}).get("run", ""))
    if not deployed:
        checkpoint.load(folder.checkpoint, sim)
    elif with_state and algorithm.remember(sim.network.params(), sim.network.statistics()):
        raise RunError(
            f"{folder.path} is a Flower run of {algorithm.name}, whose clients remember what only their own devices "
            "have: a client's own model cannot be made here"
        )
    else:
        checkpoint.load_deployed(folder.checkpoint, sim, deployed)
    return about, task.scale, sim, final_model(algorithm, sim.server, sim.network.module, sim.measures.class_dim)


def simulation_of(
    run: Result | Path | str, task: Task | None, algorithm: Algorithm | None, call: str
) -> tuple[Mapping[str, str], Simulation]:
    """What a run is about, and its simulation where it stopped."""
    if isinstance(run, Result):
        return run.summary, run.simulation
    about, _, sim, _ = _restored(RunFolder(Path(run)), task, algorithm, with_state=True, best=False, call=call)
    return about, sim


def personal_model(sim: Simulation, client: int) -> nn.Module:
    """Return the hard assignment that a client would commit to if it were called in the next round."""
    if not 0 <= client < sim.data.clients:
        raise SettingError(f"there is no client {client}: clients run from 0 to {sim.data.clients - 1}")
    if not sim.data.train.size(client):
        raise DataError("a client's own model is trained on its examples: pass the task that has them (task=…)")
    turn, (memory,) = Turn(sim.root, sim.round + 1, client), sim.recall([client])
    batches = ClientBatches(sim.data, client, sim.workload, turn.key(Purpose.BATCHES))
    rate = sim.settings.rates.at(sim.round + 1).local
    model = protocol.rehearse(sim.algorithm, sim.network, sim.server, batches, turn, memory, rate)
    return with_values(copy.deepcopy(sim.network.module), model)


def export(
    run: Result | Path | str,
    to: Path | str,
    *,
    personalise: int | None = None,
    best: bool = False,
    task: Task | None = None,
    network: Network | None = None,
    algorithm: Algorithm | None = None,
    onnx: bool | None = None,
    align: int = 8,
) -> Description:
    """Write a run's compact network as plain torch and ONNX, checked on test inputs; return what model.json says.

    With your own `network`, its folder is enough. Where there are no test inputs, random ones around the network's
    example are used.
    """
    task = task_of(run, task, network)
    found = trained(run, personalise=personalise, best=best, task=task, algorithm=algorithm)
    example = found.judged[0].example
    if not isinstance(found.x, Tensor) or not isinstance(example, Tensor):
        raise ModelError(f"an export reads one tensor, and this network has several inputs: {example}")
    _check_statistics(found)
    x, what = (found.x[:1024], "test inputs") if len(found.x) else (around(example), "inputs around the example")
    raw: dict[str, Any] = {"scale": found.scale._asdict() if isinstance(found.scale, Scale) else None}
    raw |= {"alphabet": found.scale.characters} if isinstance(found.scale, Alphabet) else {}
    about = {"title": found.title, "client": found.client, "compared_on": what, **raw}
    return export_module(found.module, x, Path(to), about=about, with_onnx=onnx, align=align)


def _check_statistics(found: Trained) -> None:
    """Refuse a network whose predictions depend on the other examples in the batch."""
    for name, part in found.module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None:
            raise ModelError(
                f"module {name!r} has no statistics to export: the run had statistics=batch or local. Train with "
                "statistics=shared, or with local and export a client's own network (--personalise)"
            )


def _with_weights(path: Path, module: nn.Module, class_dim: int | None = -1) -> nn.Module:
    """Return the module with a run's weights, or an ensemble of modules if the run has several."""
    try:
        weights = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged and cannot be read ({error})") from error
    numbers = {name.split(".")[1] for name in weights if name.startswith("members.")}
    whole = copy.deepcopy(module)
    if numbers and not hasattr(module, "members"):
        whole = Ensemble([copy.deepcopy(module) for _ in numbers], class_dim)
    other = f"{path} holds the weights of another network: other names or shapes"
    try:
        whole = with_values(whole, weights)
    except RuntimeError as error:
        raise RunError(other) from error
    if learned(whole).keys() != weights.keys():
        raise RunError(other)
    return whole


def evaluate(
    run: Result | Path | str,
    *,
    data: Examples | Path | str | None = None,
    personalise: int | None = None,
    best: bool = False,
    posterior: nn.Module | None = None,
    task: Task | None = None,
    network: Network | None = None,
    algorithm: Algorithm | None = None,
) -> dict[str, Any]:
    """Return the mean loss, your own metrics and, if targets are classes, accuracy and accuracy by class, on the run's
    test examples or on others: tensors (x, y), or a file or folder.

    With your own `network`, its folder and `data` are enough. With `best`, evaluate the network of the best evaluation,
    if the run kept it. With `personalise`, evaluate that client's own network, on its own test examples unless `data`
    is given, and beside it the server's, as `server`. With `posterior`, made by `fedprior.posterior`, evaluate that
    instead, again with the server's network beside it.
    """
    if posterior is not None and not isinstance(posterior, nn.Module):
        raise SettingError(f"posterior is {described(posterior)}; give what fedprior.posterior returns")
    if posterior is not None and (best or personalise is not None):
        raise SettingError("a posterior is of the last server: choose one of posterior, best and personalise")
    if data is not None and task is not None and network is None and not len(task.data.train.rows):
        network, task = task.network, None  # what its targets are is not known before there are some
    if network is not None:
        task, data = task_of(run, task, network, data), None
    found = trained(run, personalise=personalise, best=best, task=task, algorithm=algorithm, call="evaluate")
    _check_source(posterior, found.source)
    x, y = (found.x, found.y) if data is None else _read(data, found)
    if len(x) == 0:
        raise DataError("there are no test examples to evaluate on; give some (--data)")
    own = _score(posterior or found.module, x, y, *found.judged)
    alone = personalise is None and posterior is None
    beside = {} if alone else {"server": _score(found.server, x, y, *found.judged)}
    return {"title": found.title, "examples": len(y), **own, **beside}


def _check_source(posterior: nn.Module | None, own: Source) -> None:
    """Refuse an ensemble of another run. A network that `fedprior.posterior` did not make may be anything."""
    source = getattr(posterior, "source", None) if isinstance(posterior, Ensemble) else None
    if source and source != own:
        other = f"of {source.title}" if source.title != own.title else "of another run with this title"
        raise SettingError(f"the posterior is {other}, and the run is {own.title}: draw it from the run itself")


def _read(data: Examples | Path | str, found: Trained) -> Examples:
    """Examples for this network, perhaps of a file or folder."""
    if isinstance(data, tuple):
        known = examined(data, found.judged[0])
        return known.test_x, known.test_y
    if not isinstance(found.x, Tensor):
        raise DataError(f"files hold one input, and this network has several: {found.x[0]}")
    scale = found.scale if isinstance(found.scale, Scale) else None
    return Reader(tuple(found.x.shape[1:]), found.x.dtype, scale).labelled(Path(data), found.y)


def _score(module: nn.Module, x: ModelInputs, y: Tensor, network: Network, what: Measures) -> dict[str, Any]:
    outputs = outputs_of(module, x)
    with torch.no_grad():
        if what.class_dim is not None:
            low, high, classes = int(y[y != IGNORED].min()), int(y.max()), outputs.shape[what.class_dim]
            if low < 0 or high >= classes:
                raise DataError(f"labels run from {low} to {high}, but the network knows {classes} classes")
        found = each(network, what, outputs, y)
        whole = joined(what, found.sum(1), parts(what, outputs, y), torch.ones(len(y), dtype=torch.float64)) / len(y)
    scores: dict[str, Any] = dict(zip(what.names, whole.tolist(), strict=True))
    if what.class_dim is None or y.dim() > 1:
        return scores
    right = found[what.means.index("accuracy")]
    return {**scores, "by_class": {int(c): (int(right[y == c].sum()), int((y == c).sum())) for c in y.unique()}}
