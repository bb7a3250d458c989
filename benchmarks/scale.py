"""Measure what clients outside the round cost: start-up, round and memory for 1,000 to 100,000 clients.

    python benchmarks/scale.py [--device cuda]

Each number of clients runs in a separate process. A client has eight images of 16×16; ten clients train in a round.
"""

import argparse
import multiprocessing
import resource
import statistics
import time

import numpy as np
import torch
from torch import nn

import fedprior
from fedprior.catalogue.data import dirichlet
from fedprior.core.federated import FederatedData, Shards
from fedprior.core.network import Network
from fedprior.core.settings import Settings
from fedprior.engines.build import build
from fedprior.engines.modes import engine, mode_of

EXAMPLES, PIXELS = 8, 256


def measure(clients: int, device: str) -> None:
    # The interpreter, torch and, on a GPU, its context do not count.
    torch.zeros(1, device=device)
    before, began = peak(), time.perf_counter()
    draw = np.random.RandomState(0)
    y = draw.randint(10, size=EXAMPLES * clients)
    x = torch.empty(len(y), PIXELS).normal_()
    train, _ = dirichlet(y, y[:0], clients, 1.0, 0)
    none = Shards(torch.zeros(0, dtype=torch.int64), np.zeros(clients + 1, np.int64))
    data = FederatedData(x, torch.from_numpy(y), x[:0], torch.from_numpy(y[:0]), Shards.of(train), none, 10)
    data.check()
    network = Network(nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, 10)), x[0])
    settings = Settings(clients_per_round=10, batch_size=4, device=device)
    simulation = build(fedprior.algorithm("fedavg", network), network, data, settings)
    driver = engine([simulation], mode_of("auto", "auto", simulation))
    started, times = time.perf_counter() - began, []
    for _ in range(30):
        began = time.perf_counter()
        driver.step(evaluate=False)
        times.append(time.perf_counter() - began)
    size = x.numel() * 4 / 2**20
    print(
        f"| {clients:,} | {started:.1f} | {1e3 * statistics.median(times):.1f} | {size:.0f} | {peak() - before:.0f} |",
        flush=True,
    )


def peak() -> float:
    """Peak resident memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    chosen = parser.parse_args()
    print("| clients | start-up, s | ms per round | data, MiB | memory, MiB |\n| ---: | ---: | ---: | ---: | ---: |")
    for clients in chosen.clients:
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(clients, chosen.device))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
