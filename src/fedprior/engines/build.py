"""From settings to a simulation: their effect on an algorithm, what they rule out, and the device."""

from dataclasses import replace

import torch

from fedprior.core import keys
from fedprior.core.errors import SettingError
from fedprior.core.federated import FederatedData
from fedprior.core.frozen import copied
from fedprior.core.keys import Purpose
from fedprior.core.metrics import blank_scores, measures, named
from fedprior.core.network import Network
from fedprior.core.optimisers import TreeOptimiser
from fedprior.core.options import check_effect
from fedprior.core.settings import RUN_OPTIONS, Settings
from fedprior.core.trainable import check_statistics, check_trainable
from fedprior.core.weighting import check_takes_weight
from fedprior.core.workers import Workers
from fedprior.em import Algorithm, Statistics
from fedprior.engines import ranks
from fedprior.engines.attack import ATTACKS, POISONED, check_attack
from fedprior.engines.devices import prepare
from fedprior.engines.loop.round import Simulation
from fedprior.engines.modes import mode_of
from fedprior.engines.privacy import accountant_of, check_budget, check_guard, guard_of
from fedprior.engines.unseen import Roll, held_out
from fedprior.wire import Wire


def applied(settings: Settings, algorithm: Algorithm) -> Algorithm:
    """Apply settings to an algorithm: the precision of its messages, its statistics, its number of rounds."""
    statistics = Statistics(settings.statistics, settings.report_statistics, settings.statistics_momentum)
    fitted, wire = algorithm.prior.fit(settings.rounds), Wire.of(settings.wire, settings.entropy)
    bound = 0.0 if settings.private else settings.bound  # who is left out would depend on the others
    return replace(algorithm, prior=fitted, wire=wire, statistics=statistics, bound=bound, guard=guard_of(settings))


def check_run(settings: Settings, algorithm: Algorithm, network: Network, clients: int, *, uneven: bool) -> None:
    """Refuse what cannot be trained. If `uneven`, clients may have different numbers of examples."""
    check_trainable(network.module)
    check_statistics(network.module, settings.statistics)
    algorithm.check(network.params())
    named(settings.metrics)
    left = clients - held_out(clients, settings.unseen)
    if settings.clients_per_round > left:
        besides = "" if left == clients else f" that take part (unseen={settings.unseen})"
        raise SettingError(
            f"clients_per_round is {settings.clients_per_round}, but there are only {left} clients{besides}"
        )
    check_guard(settings, algorithm, network)
    if settings.weighting == "examples" and uneven and not settings.private:
        check_takes_weight(algorithm.prior)


def check_useful(settings: Settings, algorithm: Algorithm, network: Network, clients: int, *, tested: bool) -> None:
    """Refuse settings that would have no effect. If `tested`, there are test examples.

    This applies only to new runs: a recorded run may be older than a rule, and is resumed as it was.
    """
    check_effect(RUN_OPTIONS, vars(settings), algorithm=algorithm, network=network, clients=clients, tested=tested)


def device_of(settings: Settings) -> torch.device:
    """The device to run on, prepared for a run."""
    device = _named_device(settings)
    prepare(device)
    return device


def _named_device(settings: Settings) -> torch.device:
    try:
        named = torch.device("cuda" if settings.device == "auto" else settings.device)
        if named == torch.device("cuda") and (torch.cuda.is_available() or settings.device == "auto"):
            return ranks.gpu() if torch.cuda.is_available() else torch.device("cpu")
        torch.zeros(1, device=named)
    except (RuntimeError, AssertionError) as error:
        raise SettingError(f"device {settings.device!r} is not available here") from error
    return named


def build(algorithm: Algorithm, network: Network, data: FederatedData, settings: Settings) -> Simulation:
    """The simulation of a run before its first round."""
    check_run(settings, algorithm, network, data.clients, uneven=len(set(data.train.sizes)) > 1)
    check_attack(settings.attack, data)
    roll = Roll.of(keys.key(settings.seed), data.clients, settings.unseen)
    check_budget(settings, len(roll.seen))
    device, algorithm = device_of(settings), applied(settings, algorithm)
    # Copy the module: the user's own must keep its device and weights.
    network = replace(network, module=copied(network.module).to(device))
    server, what = algorithm.init(network.params(), network.statistics()), measures(network, data, settings.metrics)
    root, hostile = keys.key(settings.seed, device), torch.zeros(data.clients, dtype=torch.bool, device=device)
    attackers = round(settings.attackers * data.clients)
    hostile[keys.choose(keys.fold(root, Purpose.ATTACK), data.clients, attackers)] = True
    streamed = settings.data == "host" or (settings.data == "auto" and not data.fits(device))
    workers = 1 if device.type != "cpu" else settings.workers or torch.get_num_threads()
    built = Simulation(
        algorithm=algorithm,
        network=network,
        data=data if streamed else data.to(device),
        settings=settings,
        root=root,
        workers=Workers(network, workers),
        encode=settings.messages != "count",
        streamed=streamed,
        attack=ATTACKS.get(settings.attack),
        poisoned=settings.attack in POISONED,
        hostile=hostile,
        server=server,
        optimiser=TreeOptimiser(algorithm.server, server) if algorithm.server is not None else None,
        measures=what,
        roll=roll,
        scores=blank_scores(what, data.clients),
        accountant=accountant_of(settings, len(roll.seen)),
    )
    mode_of(settings.mode, settings.messages, built)  # refuses impossible modes before anything is written
    return built
