"""Where the GPU's time goes in a round: the kernels of some captured rounds, by name.

    PYTHONPATH=src python benchmarks/kernel_times.py --tasks cifar10,cifar100 --peers fedavg,fedsparse

For each it prints milliseconds and launches of a round, how much of the round the GPU was busy, and the kernels that
took longest. A profiled round is a little slower than one of `peers.py`.
"""

import argparse
import time
from collections import Counter

import torch
from contestants import ours
from contestants.tasks import TASKS
from torch.profiler import ProfilerActivity, profile

from fedprior.report.table import Table

WARM = 5
"""Rounds that compile and capture before the first that counts."""


def kernel_times(task: str, peer: str, rounds: int) -> tuple[float, Counter[str], Counter[str]]:
    """Milliseconds of a round without the profiler; then each kernel's microseconds and launches in all `rounds`."""
    runs = ours.SWEPT if peer == "sweep" else ((0, {}),)
    driver = ours.driver(TASKS[task], "cuda", "fedsparse" if peer == "sweep" else peer, runs)
    for _ in range(WARM):
        driver.step(evaluate=False)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        driver.step(evaluate=False)
    torch.cuda.synchronize()
    each = (time.perf_counter() - began) / rounds * 1e3
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(rounds):
            driver.step(evaluate=False)
        torch.cuda.synchronize()
    times, launches = Counter[str](), Counter[str]()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time
            launches[event.name] += 1
    return each, times, launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="cifar10,cifar100", help=f"separated by commas: {', '.join(TASKS)}")
    parser.add_argument("--peers", default="fedavg,fedsparse", help="algorithms, or sweep: nine FedSparse runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top", type=int, default=25, help="how many kernels to name")
    chosen = parser.parse_args()
    for task in chosen.tasks.split(","):
        for peer in chosen.peers.split(","):
            each, times, launches = kernel_times(task, peer, chosen.rounds)
            busy = sum(times.values()) / chosen.rounds / 1e3
            print(
                f"{task}, {peer}: {each:.2f} ms a round, {sum(launches.values()) // chosen.rounds} launches, "
                f"kernels busy for {busy:.2f} ms"
            )
            rows = [
                [f"{times[name] / chosen.rounds / 1e3:.3f}", str(launches[name] // chosen.rounds), name[:110]]
                for name, _ in times.most_common(chosen.top)
            ]
            print(Table(["ms", "launches", "kernel"], rows).markdown(), flush=True)


if __name__ == "__main__":
    main()
