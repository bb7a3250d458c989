"""An algorithm: a prior, and how to take its two steps."""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedprior import wire
from fedprior.core.errors import SettingError, described
from fedprior.core.optimisers import NOT_ELEMENTWISE, Optimiser
from fedprior.core.trees import Gates, Params, Tree
from fedprior.corrections import Correction
from fedprior.em import statistics as norm_statistics
from fedprior.em.guard import Guard
from fedprior.em.statistics import Statistics
from fedprior.priors import Assignment, Prior
from fedprior.wire import Layout, Wire

RECENT = 8
"""From how many rounds the server knows how far away an upload usually is."""


@dataclass(frozen=True)
class Algorithm:
    """A prior, the way to take its two steps, and a correction of the local gradient."""

    prior: Prior
    local: Mapping[str, Optimiser]
    """One optimiser per section of the client's variables."""
    server: Mapping[str, Optimiser] | None = None
    """One optimiser per section of the server's state; None for the closed-form M-step."""
    correction: Correction = field(default_factory=Correction)
    name: str = "own"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of a named algorithm, for a run's config."""
    wire: Wire = field(default_factory=Wire)
    """How precisely its messages travel."""
    average: bool = False
    """Whether the server ships the average of its rounds instead of the last one. Clients never receive it."""
    statistics: Statistics = field(default_factory=Statistics)
    """How the statistics of a network's norms are treated."""
    bound: float = 0.0
    """How many times as far away as usual an upload may be before it is left out; 0: any. See `reception.py`."""
    guard: Guard | None = None
    """How uploads are clipped and noised before the M-step; None: not at all."""
    shapes: Mapping[str, tuple[int, ...]] | None = None
    """The parameters of the network for which its gates were made; None if it takes any."""

    def __post_init__(self) -> None:
        for what, part, kind in (("prior", self.prior, Prior), ("correction", self.correction, Correction)):
            if not isinstance(part, kind):
                raise SettingError(f"{what} must be a {kind.__name__}, got {described(part)}")
        for where, optimisers in (("local", self.local), ("server", self.server or {})):
            if not isinstance(optimisers, Mapping) or any(not isinstance(o, Optimiser) for o in optimisers.values()):
                raise SettingError(
                    f"{where} must be one fedprior.Optimiser for each section of variables, such as "
                    f"{where}={{'weights': fedprior.Optimiser('SGD', {{'lr': 0.05}})}}, got {described(optimisers)}"
                )

    def __repr__(self) -> str:
        """Show name, prior and steps rather than every gate."""
        return f"Algorithm({self.name!r}, {type(self.prior).__name__}, {self.steps})"

    def recorded(self) -> dict[str, Any]:
        """What a run's config says about it: its settings or, if it was built by hand, its parts."""
        return dict(self.settings) or self.made()

    def made(self) -> dict[str, Any]:
        """Its parts, by name."""
        parts = {"prior": self.prior, "correction": self.correction}
        made: dict[str, Any] = {"average": self.average} if self.average else {}
        for role, part in parts.items():
            names = [f.name for f in fields(part)] if is_dataclass(part) else sorted(getattr(part, "__dict__", {}))
            made |= {role: type(part).__name__, **{f"{role}_{name}": _told(getattr(part, name)) for name in names}}
        for where, optimisers in (("local", self.local), ("server", self.server or {})):
            made |= {f"{where}_optimiser_{section}": optimiser for section, optimiser in optimisers.items()}
        return made

    def at(self, settings: Mapping[str, Tensor]) -> "Algorithm":
        """The algorithm of one of several stacked runs: see `Prior.at`."""
        return replace(self, prior=self.prior.at(settings))

    def check(self, params: Params) -> None:
        """Refuse settings that are out of range, and a network that the gates were not made for."""
        self.prior.check()
        if self.server is None and type(self.prior).solve is Prior.solve:
            raise SettingError(
                f"{type(self.prior).__name__} has no M-step in closed form: give it `solve`, or the algorithm a server "
                "optimiser, such as server={'weights': fedprior.Optimiser('Adam', {'lr': 0.001})}"
            )
        if self.shapes is not None and self.shapes != {name: tuple(value.shape) for name, value in params.items()}:
            raise SettingError(
                f"this {self.name} was built for another network: build it with "
                f"fedprior.algorithm({self.name!r}, task.network)"
            )

    @property
    def vectorises(self) -> bool:
        """Whether a stacked cohort can share local optimisers, and stacked runs can share server optimisers."""
        optimisers = [*self.local.values(), *(self.server or {}).values()]
        return not any(optimiser.name in NOT_ELEMENTWISE for optimiser in optimisers)

    @property
    def main(self) -> Optimiser:
        """The clients' optimiser of weights or, where those are fixed, of what there is instead."""
        return self.local.get("weights", next(iter(self.local.values())))

    @property
    def steps(self) -> str:
        """Describe the optimisers of its two steps in words."""

        def each(optimisers: Mapping[str, Optimiser]) -> str:
            only = len(optimisers) == 1
            return " and ".join(f"{how}{'' if only else f' on {what}'}" for what, how in optimisers.items())

        return f"{each(self.local)} at the clients, {each(self.server) if self.server else 'closed form'} at the server"

    def init(self, params: Params, statistics: Params | None = None) -> Tree:
        """The server's state from a dense model, with the initial statistics of its norms."""
        server = {**self.prior.init(params), **self.correction.init(params)}
        plain = type(self.prior).broadcast is Prior.broadcast
        if untold := [section for section in self.prior.told if plain and section not in server]:
            raise SettingError(
                f"{type(self.prior).__name__} tells its clients {', '.join(untold)} (`told`), but its server has only "
                f"{', '.join(server)}"
            )
        if statistics and self.statistics.kind == "shared":
            name, several = next(iter(server["weights"].items()))
            if several.dim() > params[name].dim():
                statistics = norm_statistics.stacked(statistics, len(several))
            server = {**server, "statistics": statistics}
        some = next(iter(server["weights"].values()))
        if self.average:
            server = {**server, "average": dict(server["weights"]), "averaged": {"rounds": some.new_zeros(())}}
        if self.guard is not None:
            server = {**server, **self.guard.init(some)}
        if not self.bound:
            return server
        usual = {name: some.new_zeros(RECENT, dtype=torch.float64) for name in self.uplink(server).sections}
        return {**server, "usual": usual} if usual else server

    def settle(self, server: Tree) -> Tree:
        """Add the weights to the average after an M-step: w̄ ← w̄ + (w − w̄) · 20 / (t + 19).

        This is polynomial decay (Shamir and Zhang 2013): about the last twentieth of the rounds counts, however many.
        """
        rounds = server["averaged"]["rounds"] + 1
        share = 20 / (rounds + 19)
        average = {name: value + (server["weights"][name] - value) * share for name, value in server["average"].items()}
        return {**server, "average": average, "averaged": {"rounds": rounds}}

    def shipped(self, server: Tree) -> Tree:
        """The server's state as it ships: with the average of its weights, if it keeps one."""
        return {**server, "weights": server["average"]} if self.average else server

    def predict(self, server: Tree) -> Params:
        """The models that the server ships, stacked."""
        return self.prior.predict(self.shipped(server))

    def ship(self, server: Tree) -> Params:
        """The same, with the statistics of their norms if the server has any."""
        models, known = self.predict(server), server.get("statistics")
        if known is None:
            return models
        several = known if norm_statistics.is_stacked(known) else norm_statistics.stacked(known, 1)
        return {**models, **norm_statistics.without_count(several)}

    def remember(self, params: Params, statistics: Params) -> Tree:
        """What a client remembers before its first turn."""
        kept = {"statistics": statistics} if statistics and self.statistics.kind == "local" else {}
        return {**self.correction.remember(params), **kept}

    def broadcast(self, server: Tree, key: Tensor) -> Tree:
        """The packet for a client."""
        packet, statistics = self.prior.broadcast(server, key), server.get("statistics", {})
        extra = self.correction.broadcast(server)
        support = self.prior.support(packet["gates"]) if (extra or statistics) and "gates" in packet else {}
        packet = self._with(packet, extra, support)
        return {**packet, "statistics": norm_statistics.masked(statistics, support)} if statistics else packet

    def report(self, upload: Tree, statistics: Params, packet: Tree) -> Tree:
        """Add to the upload the statistics of the units that it holds."""
        support = self.prior.sent(upload["gates"], packet) if "gates" in upload else {}
        return {**upload, "statistics": norm_statistics.masked(statistics, support)}

    def absorb(self, server: Tree, uploads: Tree) -> Tree:
        """Update the server with the statistics of a cohort's uploads."""
        if "statistics" not in server:
            return server
        known = server["statistics"]
        sent = torch.func.vmap(self.prior.sent, (0, None))(uploads["gates"], server) if "gates" in uploads else {}
        answers = torch.func.vmap(self.prior.responsibilities, (0, None)) if norm_statistics.is_stacked(known) else None
        shares = answers(Assignment.of(uploads["weights"], uploads), server) if answers else None
        found = norm_statistics.absorb(known, uploads["statistics"], sent, shares, self.statistics.momentum)
        return {**server, "statistics": found}

    def protect(self, uploads: Tree, server: Tree, key: Tensor, *, nobody: bool = False) -> tuple[Tree, Tree]:
        """What the server learns from: a cohort's uploads, clipped and noised if the run says so; and the server with
        its next clip. `nobody`: the only upload is of no client."""
        if self.guard is None:
            return uploads, server
        layout = self.uplink(server)
        section = layout.sections["weights"]
        own = {name: gate for name, gate in uploads.get("gates", {}).items() if name not in layout.marks}
        mask = section.support or section.mask
        sent = torch.func.vmap(mask)(own) if mask and own else Params()
        return self.guard(uploads, sent, server, key, nobody=nobody)

    def answer(self, upload: Tree, extra: Tree, packet: Tree) -> Tree:
        """Add the correction's part to the upload."""
        support = self.prior.sent(upload["gates"], packet) if extra and "gates" in upload else {}
        return self._with(upload, extra, support)

    @property
    def differences(self) -> bool:
        """Whether uploads are differences from packets: where anything is rounded, or only a part is sent."""
        return self.wire.rounds or self.correction.differences

    def prepare(self, upload: Tree, packet: Tree, memory: Tree) -> Tree:
        """What a client means to send."""
        support = self.prior.sent(upload["gates"], packet) if "gates" in upload else {}
        return self.correction.prepare(upload, packet, memory, support)

    def _with(self, message: Tree, extra: Tree, support: Params) -> Tree:
        """Add the correction's part to a message of the prior, for the weights that the message holds."""
        masked = {
            section: {name: value * support.get(name, 1.0) for name, value in values.items()}
            for section, values in extra.items()
        }
        return {**message, **masked}

    def downlink(self, server: Tree) -> Layout:
        """The layout of a packet."""
        layout = self.correction.extend(self.prior.downlink(server), server, self.prior.support)
        return self.wire.layout(replace(self._extend(layout, server, self.prior.support, down=True), direction="down"))

    def uplink(self, state: Tree) -> Layout:
        """The layout of an upload. `state` is the packet that it answers, or the server's state behind that packet."""
        sent = partial(self.prior.sent, state=state)
        layout = self.correction.thin(self.correction.extend(self.prior.uplink(state), state, sent))
        return self.wire.layout(replace(self._extend(layout, state, sent, down=False), direction="up"))

    def _extend(self, layout: Layout, state: Tree, mask: Callable[[Gates], Params], *, down: bool) -> Layout:
        """Add the server's statistics to a layout."""
        if "statistics" not in state:
            return layout
        section = norm_statistics.section(state["statistics"], mask, down=down)
        return replace(layout, sections={**layout.sections, "statistics": section})

    def pack(self, spoken: Tree, layout: Layout) -> Tree:
        """A packet as it travels. Rounding moves its weights, and the prior adjusts what depends on them."""
        coded = wire.quantise(spoken, layout)
        if layout.precision is None:
            return coded
        moved = self.prior.follow(spoken, wire.restore(coded, layout).get("weights", {}))
        return {**coded, **wire.quantise({**moved, "gates": spoken.get("gates", {})}, layout)}


def _told(value: Any) -> Any:
    """A value in a form that a config can hold; for tensors, a checksum."""
    if value is None or isinstance(value, bool | int | str | Optimiser):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().contiguous()
        return f"{tuple(value.shape)} {zlib.crc32(numbers.reshape(-1).view(torch.uint8).numpy().tobytes()):08x}"
    if isinstance(value, Mapping):
        return str({str(name): str(_told(part)) for name, part in sorted(value.items(), key=str)})
    if isinstance(value, list | tuple):
        return str([str(_told(part)) for part in value])
    return type(value).__qualname__
