"""Several runs as one: the protocol by `vmap`. `Simulation.step`, which loops over clients, is its specification.

Every tensor of every run is stacked along a leading dimension, and the cohorts of all runs train as one. On a GPU the
whole round is one captured CUDA graph, replayed with other clients and other keys. Nothing waits for the host within a
round; one small tensor of numbers comes back at its end.
"""

import time
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedprior import wire
from fedprior.core import keys, trees
from fedprior.core.errors import DivergedError
from fedprior.core.inputs import ModelInputs
from fedprior.core.keys import Purpose, Turn
from fedprior.core.metrics import padded_sums
from fedprior.core.optimisers import TreeOptimiser
from fedprior.core.schedules import Rate
from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import Share
from fedprior.em import Algorithm, Batches, EStep, protocol
from fedprior.em.lifting import lifting
from fedprior.engines import arithmetic, ranks
from fedprior.engines.attack import Poisoned
from fedprior.engines.batches import CohortBatches, Extent, Places
from fedprior.engines.loop.round import Simulation
from fedprior.engines.server_state import Record, client_diverged, left_out, server_diverged
from fedprior.engines.stacked import streaming
from fedprior.engines.stacked.alike import check_alike
from fedprior.engines.stacked.joined import Kept
from fedprior.engines.stacked.tensors import (
    Captured,
    Index,
    Inputs,
    Numbers,
    Outputs,
    Shape,
    disagreement_of,
    floor_flags,
    mean_over,
    own_settings,
    to_device,
    to_host,
)


class Together:
    """Simulations of one task and algorithm. Their seeds, and scalar settings of the prior, may differ."""

    def __init__(self, simulations: list[Simulation], *, capture: bool = False) -> None:
        check_alike(simulations)
        first = simulations[0]
        self.runs, self.device, self.capture = simulations, first.root.device, capture
        self.cohort, self.streamed = first.settings.clients_per_round, first.streamed
        self.algorithm = first.algorithm
        self.server = trees.stack([sim.server for sim in simulations])
        like = next(trees.leaves(self.server))[1]
        self.settings = own_settings([sim.algorithm.prior for sim in simulations], like)
        self.lift = lifting(self.algorithm, True, self.settings)
        self.of_clients = {name: value.repeat_interleave(self.cohort) for name, value in self.settings.items()}
        """The same settings, one row for each client of a round."""
        self.optimiser = _stacked_optimiser(first.algorithm, simulations, self.server)
        self.roots = [keys.key(sim.settings.seed) for sim in simulations]
        self.root = to_device(torch.stack(self.roots), self.device)
        shards = [(sim.data.train, sim.data.test) for sim in simulations]
        self.train, self.test = (Index.of(list(part), self.device) for part in zip(*shards, strict=True))
        counts = [sim.data.clients for sim in simulations]
        self.base = torch.tensor([0, *np.cumsum(counts)[:-1]], device=self.device)[:, None]
        self.hostile = torch.cat([sim.hostile for sim in simulations])
        uneven = any(len(set(sim.data.train.sizes)) > 1 for sim in simulations)
        self.weighs = first.settings.weighting == "examples" and uneven
        self.examples = torch.tensor([int(sim.roll.sizes(sim.data).sum()) for sim in simulations], device=self.device)
        self.blank = first.algorithm.remember(first.network.params(), first.network.statistics())
        self.downlink = first.algorithm.downlink(first.server)
        self.rate = Rate()
        self.seen: set[Shape] = set()
        self.graphs: dict[Shape, Captured] = {}
        self.diverged: dict[int, DivergedError] = {}
        self.alive = torch.ones(len(simulations), dtype=torch.bool, device=self.device)
        """Runs that have not diverged. The others keep their state from before that round."""
        self.counted = False
        """Whether the optimiser's counts, which all runs share, moved in the last round."""
        self.settled: set[int] = set()
        """Diverged runs that already have their moments back."""
        self.layers: list[str] = []
        self._show()

    # ------------------------------------------------------------------ one round
    def step(self, evaluate: bool) -> list[Record | DivergedError]:
        """Run one round of every run. A run that diverged returns its error from then on."""
        with arithmetic.using(self.runs[0].settings.arithmetic, self.device):
            return self._step(evaluate)

    def _step(self, evaluate: bool) -> list[Record | DivergedError]:
        start = time.perf_counter()
        clients, shape, inputs = self._prepare(max(run.round for run in self.runs) + 1)  # not all have diverged
        outputs = self._replay(shape, inputs)
        numbers = Numbers(*to_host(outputs.numbers))
        fine = self._goes_on(numbers.fine_clients) & numbers.fine_server & self._kept(numbers).any(1)
        self.counted = any(bool(fine[place]) for place in range(len(fine)) if place not in self.diverged)
        for place, run in enumerate(self.runs):
            if place not in self.diverged:
                self._close(place, run, clients[place], numbers, outputs.memory)
        seconds = (time.perf_counter() - start) / len(self.runs)
        records: list[Record | DivergedError] = []
        for place, run in enumerate(self.runs):
            began = time.perf_counter()
            records.append(self.diverged.get(place) or self._record(place, run, clients[place], numbers, evaluate))
            run.seconds += seconds + time.perf_counter() - began
        return records

    def sync(self) -> None:
        """Write the server's moments back to every run, so that it can be saved as if it had run alone.

        Call it after the round in which a run diverges: later, its number of steps is no longer known.
        """
        for place, run in enumerate(self.runs):
            if self.optimiser and run.optimiser and run.round > 0 and place not in self.settled:
                late = place in self.diverged and self.counted
                run.optimiser.load_state(self.optimiser.row(place, late=late))
        self.settled = set(self.diverged)

    def _prepare(self, number: int) -> tuple[list[list[int]], Shape, Inputs]:
        """Choose the cohorts, on the host."""
        clients = [
            run.roll.cohort(Turn(root, number), self.cohort) for root, run in zip(self.roots, self.runs, strict=True)
        ]
        pairs = [(run.data, client) for run, chosen in zip(self.runs, clients, strict=True) for client in chosen]
        extent = Extent.of([data.train.size(client) for data, client in pairs], self.runs[0].workload)
        tests = max(data.test.size(client) for data, client in pairs)
        shape = Shape(extent, 1 << (tests - 1).bit_length() if tests > 1 else tests)
        remembered = [
            run.memory.get(client, self.blank)
            for run, chosen in zip(self.runs, clients, strict=True)
            for client in chosen
        ]
        memory = trees.stack(remembered) if self.blank else {}
        chosen, numbers = torch.tensor(clients), torch.full((len(clients),), number)
        mine = [pairs[place] for place in ranks.share(len(pairs))]
        examples = streaming.cohort_examples(mine, extent.capacity, shape.tests, self.device) if self.streamed else {}
        self.rate = self.runs[0].settings.rates.at(number)
        # In a graph, rates must be tensors that each replay reads.
        fixed = self.runs[0].settings.rates.constant or not self.capture
        rates = {} if fixed else {k: to_device(torch.tensor(v), self.device) for k, v in self.rate._asdict().items()}
        inputs = Inputs(to_device(chosen, self.device), to_device(numbers, self.device), memory, rates, examples)
        return clients, shape, inputs

    def _replay(self, shape: Shape, inputs: Inputs) -> Outputs:
        """Run the first round of a shape directly, which warms everything up; capture the second."""
        if not self.capture or shape not in self.seen:
            self.seen.add(shape)
            return self._round(shape, inputs)
        if shape not in self.graphs:
            pool = next(iter(self.graphs.values())).graph.pool() if self.graphs else None
            self.graphs[shape] = Captured(partial(self._round, shape), inputs, pool)
        return self.graphs[shape](inputs)

    def _round(self, shape: Shape, inputs: Inputs) -> Outputs:
        """One round of hard EM: tensors in, tensors out, and the state changes in place."""
        number, rate = len(self.runs), Rate(**inputs.rates) if inputs.rates else self.rate

        server = self.lift(lambda own: own.prior.prune)(self.server)
        said, packets, down = self._speak(server, self._turns(inputs))
        step, scores = self._take_turns(shape, inputs, packets, rate.local)
        uploads, sizes = self._hear(step, said)
        loss = step.loss.unflatten(0, (number, self.cohort))
        fine_clients = protocol.finite(uploads, 2) & loss.isfinite()
        key = self.root  # only a private run has noise, and its clients train in turn
        clip = server["clip"]["norm"][:, None].clone() if "clip" in server else torch.zeros(number, 0)
        uploads, server = protocol.protect(
            self.algorithm, server, uploads, key, vectorised=True, settings=self.settings
        )
        # Before the update, which is in place: a packet may share the server's memory.
        gates = lifting(self.algorithm, True, self.of_clients)(lambda own: own.prior.gates)(packets)
        found = self._conclude(server, uploads, fine_clients, inputs.clients, rate.server)
        counted = torch.where(found.kept.any(1, keepdim=True), found.kept, fine_clients)

        self.layers = list(said.get("floored") or server.get("floored") or uploads.get("floored") or [])
        numbers = Numbers(
            loss=mean_over(loss, counted),
            up=(sizes * fine_clients).sum(1),
            down=down,
            fine_clients=fine_clients,
            fine_server=found.sound,
            apart=found.apart,
            clip=clip,
            disagreement=disagreement_of(step.gates, gates, counted),
            floored=floor_flags(said, 2) | floor_flags(server, 1) | floor_flags(uploads, 2),
            scores=scores.reshape(number, -1),
        )
        return Outputs(numbers, step.memory)

    def _turns(self, inputs: Inputs) -> Turn:
        """[runs, cohort]: the source of each client's draws."""
        root, number = (part[:, None].expand(-1, self.cohort) for part in (self.root, inputs.round))
        return Turn(root, number, inputs.clients)

    def _speak(self, server: Tree, turn: Turn) -> tuple[Tree, Tree, Tensor]:
        """What the runs say [runs, cohort, …], the packets as clients hear them [runs · cohort, …], and the bytes that
        each run sends."""

        def to_one(own: Algorithm, server: Tree, key: Tensor) -> tuple[Tree, Tree, Tensor]:
            said, coded = protocol.speak(own, server, key, self.downlink)
            return said, protocol.hear(coded, self.downlink), wire.count_bytes(coded, self.downlink)

        key = protocol.broadcast_keys(self.algorithm.prior, turn)
        if self.algorithm.prior.per_client:
            said, heard, sizes = self.lift(lambda own: vmap(partial(to_one, own), (None, 0)))(server, key)
        else:
            # With a single run, all clients share the memory of one packet.
            said, heard, sizes = trees.tree_map(
                lambda leaf: leaf.unsqueeze(1).expand(-1, self.cohort, *leaf.shape[1:]),
                self.lift(lambda own: partial(to_one, own))(server, key[:, 0]),
            )
        return said, trees.tree_map(lambda leaf: leaf.flatten(0, 1), heard), sizes.sum(1)

    def _take_turns(self, shape: Shape, inputs: Inputs, packets: Tree, rate: float | Tensor) -> tuple[EStep, Tensor]:
        """Train all clients at once, or this rank's share: the E-steps' results [runs · cohort, …], and the scores of
        their hard assignments."""
        first, everyone = self.runs[0], len(self.runs) * self.cohort
        flat = (inputs.clients + self.base).flatten()
        turn = trees.tree_map(Tensor.flatten, self._turns(inputs))
        rows = (flat, turn, packets, inputs.memory, self.of_clients)
        flat, turn, packets, memory, settings = ranks.own(rows, everyone)
        examples = self._examples("train", inputs, flat)
        batches: Batches = CohortBatches(*examples, first.workload, shape.extent, turn.key(Purpose.BATCHES))
        batches = Poisoned(batches, self.hostile[flat]) if first.poisoned else batches
        tamper = partial(vmap(first.attack), self.hostile[flat]) if first.attack else None
        take_turn = partial(protocol.take_turn, rate=rate, tamper=tamper, vectorised=True, settings=settings)
        step, models = take_turn(self.algorithm, first.network, packets, batches, turn, memory)
        scores = self._scores(models, *self._examples("test", inputs, flat), shape.tests)
        return ranks.gather((step, scores), everyone)

    def _hear(self, step: EStep, said: Tree) -> tuple[Tree, Tensor]:
        """The uploads as the servers hear them, [runs, cohort, …], and the bytes of each."""

        def from_one(coded: Tree, said: Tree) -> tuple[Tree, Tensor]:
            layout = self.algorithm.uplink(said)
            return protocol.hear(coded, layout, said), wire.count_bytes(coded, layout)

        sent, uploads = trees.tree_map(lambda leaf: leaf.unflatten(0, (-1, self.cohort)), (step.sent, step.upload))
        heard, sizes = vmap(vmap(from_one))(sent, said)
        return {**uploads, **heard}, sizes

    def _conclude(
        self, server: Tree, uploads: Tree, fine: Tensor, clients: Tensor, rate: float | Tensor
    ) -> protocol.Conclusion:
        """Update the state of every run that goes on, in place. `fine` says which clients' numbers are finite."""
        moments = self.optimiser.moments() if self.optimiser else []
        counts, moments = [m for m in moments if not m.dim()], [m for m in moments if m.dim()]
        before = Kept(moments, len(self.runs)), Kept(counts, 1)
        conclude = partial(protocol.conclude, vectorised=True, settings=self.settings)
        found = conclude(self.algorithm, server, uploads, self.optimiser, self._share(clients), rate, fine)
        updated, fine = found.server, self._goes_on(fine) & found.sound & self.alive
        moved = fine & found.kept.any(1)
        if moments or counts:
            before[0].put(moved, moments)
            before[1].put(moved.any()[None], counts)
        elif self.optimiser and self.optimiser.moments():  # the first step of all, which no graph has
            self.optimiser.forget(~moved)
        known, new = dict(trees.leaves(self.server)), dict(trees.leaves(updated))
        stays = [path for path in new if path in known]
        Kept([known[path] for path in stays], len(self.runs)).put(fine, [new[path] for path in stays])
        for path, value in new.items():
            if path not in known:  # happens only before the first capture: pruning adds sections to a new server
                section, name = path.split("/", 1)
                self.server.setdefault(section, {})[name] = value.clone()
        return found

    def _goes_on(self, fine: Tensor) -> Tensor:
        """[runs]: which runs go on, given which clients' numbers are finite: `_check_clients`, in tensors."""
        return fine.any(1) if self.algorithm.bound else fine.all(1)

    def _kept(self, numbers: Numbers) -> Tensor:
        """[runs, cohort]: whose uploads counted."""
        return numbers.apart <= self.algorithm.bound if self.algorithm.bound else numbers.fine_clients

    def _share(self, clients: Tensor) -> Share:
        """How much each run's cohort counts: `Simulation.share`, in tensors."""
        if not self.weighs:
            return Share(self.cohort / len(self.runs[0].roll.seen))
        weight = self.train.size[clients + self.base].double()
        return Share(weight.sum(1) / self.examples, weight)

    def _examples(self, part: str, inputs: Inputs, clients: Tensor) -> tuple[ModelInputs, Tensor, Places]:
        """Where the examples of these clients are: in the resident data, or in the inputs."""
        data, index = self.runs[0].data, self.train if part == "train" else self.test
        if self.streamed:
            return streaming.places(inputs.examples[part], index.size[clients])
        x, y = (data.x, data.y) if part == "train" else (data.test_x, data.test_y)
        return x, y, index.places(clients)

    def _scores(self, models: Params, x: ModelInputs, y: Tensor, places: Places, capacity: int) -> Tensor:
        """[clients, measures]: each times the number of a client's own test examples, with its hard assignment."""
        network, what = self.runs[0].network, self.runs[0].measures
        if capacity == 0:
            return torch.zeros(len(places.size), len(what.names), dtype=torch.float64, device=places.size.device)
        rows = places.padded(capacity)
        real = torch.arange(capacity, device=rows.device) < places.size[:, None]
        return padded_sums(network, what, models, x[rows], y[rows], real)

    # ------------------------------------------------------------------ each run as if alone
    def _show(self) -> None:
        """Make every run's server a view of its row of ours."""
        for place, run in enumerate(self.runs):
            run.server = trees.row(self.server, place)

    def _close(self, place: int, run: Simulation, clients: list[int], numbers: Numbers, memory: Tree) -> None:
        """Finish a round for a run's own state."""
        number = run.round + 1
        self._show() if number == 1 else None
        if not bool(self._goes_on(numbers.fine_clients)[place]):
            self.diverged[place] = client_diverged(clients[int((~numbers.fine_clients[place]).nonzero()[0])], number)
        elif not bool(numbers.fine_server[place]):
            self.diverged[place] = server_diverged(number)
        if place in self.diverged:
            self.alive[place] = False
            return
        used = self._kept(numbers)[place].nonzero().flatten().tolist()
        for i in used if self.blank else []:
            run.memory[clients[i]] = trees.tree_map(Tensor.clone, trees.row(memory, place * self.cohort + i))
        run.measure([clients[i] for i in used], numbers.scores[place].unflatten(0, (self.cohort, -1))[used])
        run.round = number

    def _record(self, place: int, run: Simulation, clients: list[int], numbers: Numbers, evaluate: bool) -> Record:
        floored = {layer for layer, flag in zip(self.layers, numbers.floored[place].tolist(), strict=False) if flag}
        sizes = int(numbers.up[place]), int(numbers.down[place])
        faults = left_out(clients, numbers.apart[place].tolist(), self.algorithm.bound)
        record = run.record(*sizes, float(numbers.loss[place]), floored, evaluate, faults)
        if evaluate and numbers.disagreement.shape[1]:
            mean, most = numbers.disagreement[place].tolist()
            record |= {"tv_mean": mean, "tv_max": most}
        return record | ({"clip": float(numbers.clip[place])} if numbers.clip.shape[1] else {})


def _stacked_optimiser(algorithm: Algorithm, runs: list[Simulation], server: Tree) -> TreeOptimiser | None:
    """Join the server optimisers of all runs, with their moments."""
    if algorithm.server is None:
        return None
    optimiser = TreeOptimiser(algorithm.server, server, len(runs))
    states = [run.optimiser.state() for run in runs if run.optimiser is not None]
    optimiser.load_rows(states)
    return optimiser
