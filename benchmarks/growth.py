"""Measure how the cost of a round grows with clients, cohort, parameters and runs trained together.

    python benchmarks/growth.py [--device cuda] [--axes clients,cohort] [--json growth.json] [--figure growth.png]

Each point runs in a process of its own: a perceptron on random inputs, one local epoch of federated averaging. The
first point of an axis is the reference for its others. `--most` leaves out the points beyond a size.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import fedprior
from fedprior.core.federated import FederatedData, Shards
from fedprior.core.network import Network
from fedprior.core.settings import Settings
from fedprior.engines.build import build
from fedprior.engines.modes import engine, mode_of

INPUTS, CLASSES = 64, 10


class Point(NamedTuple):
    """One measurement."""

    clients: int = 1_000
    cohort: int = 10
    hidden: int = 256
    """Neurons of each of two hidden layers."""
    runs: int = 1
    examples: int = 32
    """Of each client, in batches of eight."""

    @property
    def parameters(self) -> int:
        """How many parameters the network has."""
        return (INPUTS + 1) * self.hidden + (self.hidden + 1) * self.hidden + (self.hidden + 1) * CLASSES


AXES: dict[str, tuple[str, list[Point]]] = {
    "clients": ("clients", [Point(clients=n, examples=2) for n in (100, 1_000, 10_000, 100_000, 1_000_000)]),
    "cohort": ("clients per round", [Point(cohort=n) for n in (10, 30, 100, 300, 1_000)]),
    "parameters": ("parameters", [Point(hidden=h) for h in (280, 560, 960, 1_700, 3_280)]),
    "runs": ("runs together", [Point(runs=n) for n in (1, 3, 9, 27)]),
}
"""By axis: what it is called, and its points."""


def size(axis: str, point: Point) -> int:
    """Where a point stands on its axis."""
    return int(getattr(point, axis))


def measure(point: Point, device: str, rounds: int, answer: Connection) -> None:
    """Time rounds, and send what they cost."""
    torch.zeros(1, device=device)  # the interpreter, torch and a GPU's context do not count
    before, began = peak(), time.perf_counter()
    data = examples(point)
    network = Network(module(point.hidden), data.x[0])
    mode = "vectorised" if point.runs > 1 and device == "cpu" else "auto"
    built = []
    for seed in range(point.runs):
        settings = Settings(
            clients_per_round=point.cohort, batch_size=8, seed=seed, device=device, mode=mode, messages="count"
        )
        built.append(build(fedprior.algorithm("fedavg", network), network, data, settings))
    chosen = mode_of(mode, "count", built[0])
    driver = engine(built, chosen)
    for _ in range(3):  # the first round of a shape compiles, the second is captured
        driver.step(evaluate=False)
    started, times = time.perf_counter() - began, []
    for _ in range(rounds):
        began = time.perf_counter()
        driver.step(evaluate=False)
        times.append(1e3 * (time.perf_counter() - began))
    answer.send(
        {
            **{"ms": statistics.median(times), "all_ms": times, "start_s": started, "mode": chosen},
            **{"data_mib": data.x.numel() * 4 / 2**20, "host_mib": peak() - before, "parameters": point.parameters},
        }
    )


def examples(point: Point) -> FederatedData:
    """Random examples; a client owns as many consecutive rows as every other."""
    count = point.examples * point.clients
    draw = torch.Generator().manual_seed(0)
    x, y = torch.empty(count, INPUTS).normal_(generator=draw), torch.randint(CLASSES, (count,), generator=draw)
    train = Shards(torch.arange(count), np.arange(0, count + 1, point.examples))
    none = Shards(torch.zeros(0, dtype=torch.int64), np.zeros(point.clients + 1, np.int64))
    return FederatedData(x, y, x[:0], y[:0], train, none, CLASSES)


def module(hidden: int) -> nn.Module:
    """A perceptron with two hidden layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(INPUTS, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))
    )


def peak() -> float:
    """Peak resident memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_process(point: Point, device: str, rounds: int) -> dict[str, Any]:
    """Measure in a fresh process, whose memory is its own."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=measure, args=(point, device, rounds, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = mine.recv()
    except EOFError as error:
        raise SystemExit(f"the measurement of {point} failed") from error
    finally:
        process.join()
    return found


def table(axis: str, found: list[dict[str, Any]]) -> str:
    """The points of an axis as Markdown."""
    heads = [AXES[axis][0], "ms per round", "× the first", "start-up, s", "data, MiB", "memory, MiB"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " ---: |" * len(heads)]
    for one in found:
        cells = [f"{one['size']:,}", f"{one['ms']:.1f}", f"{one['ms'] / found[0]['ms']:.2f}", f"{one['start_s']:.1f}"]
        lines.append(f"| {' | '.join([*cells, *(f'{one[name]:,.0f}' for name in ('data_mib', 'host_mib'))])} |")
    return "\n".join(lines)


def figure(axes: dict[str, list[dict[str, Any]]], path: Path, where: str) -> None:
    """Milliseconds per round against size, one panel an axis; the dashed line grows as the size does."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawing, panels = plt.subplots(1, len(axes), figsize=(3.4 * len(axes), 3.2), squeeze=False, layout="constrained")
    for panel, (axis, found) in zip(panels[0], axes.items(), strict=True):
        sizes, costs = [one["size"] for one in found], [one["ms"] for one in found]
        panel.loglog(sizes, [costs[0] * n / sizes[0] for n in sizes], "--", color="0.6", label="in proportion")
        panel.loglog(sizes, costs, "o-", color="C0", label="measured")
        panel.set(xlabel=AXES[axis][0], ylim=(min(costs) / 10, max(costs) * 10))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("ms per round")
    panels[0][0].legend(frameon=False, fontsize=8)
    drawing.suptitle(where, fontsize=9)
    drawing.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--axes", default=",".join(AXES), help=f"of {', '.join(AXES)}")
    parser.add_argument("--most", type=int, default=None, help="leave out points whose size is larger")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of each point")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--figure", type=Path, default=None)
    chosen = parser.parse_args()
    wanted = chosen.axes.split(",")
    if unknown := sorted(set(wanted) - set(AXES)):
        parser.error(f"there is no axis {', '.join(unknown)}; there are {', '.join(AXES)}")
    measured: dict[str, list[dict[str, Any]]] = {}
    for axis in wanted:
        points = [point for point in AXES[axis][1] if chosen.most is None or size(axis, point) <= chosen.most]
        if not points:
            continue
        measured[axis] = []
        for point in points:
            measured[axis].append({"size": size(axis, point), **in_process(point, chosen.device, chosen.rounds)})
        print(f"{table(axis, measured[axis])}\n", flush=True)
    cuda = chosen.device != "cpu"
    name = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    machine = {"device": name, "torch": torch.__version__}
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": machine, "rounds": chosen.rounds, "axes": measured}, indent=1))
    if chosen.figure:
        figure(measured, chosen.figure, f"{name}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
