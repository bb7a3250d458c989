"""What privacy costs in accuracy where there are many clients: 10,000 virtual ones on the embedded digits.

    python scripts/private.py --out results/private/clients10000.csv

Every client has ten training digits of mnist-mini, drawn at random. There are 10,000 such digits, so a digit is with
about ten clients: the run shows what noise for 10,000 clients does to the model, and protects nobody's digits. The
network has one hidden layer of 32 units, 200 clients take part in a round on average.
"""

import argparse
import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedprior
from fedprior.core.federated import Shards
from fedprior.core.network import Network

CLIENTS, EACH = 10_000, 10
SETTINGS = {"rounds": 50, "clients_per_round": 200, "epochs": 2, "evaluate_every": 10, "messages": "count"}
FIELDS = ("epsilon", "seed", "noise", "spent", "accuracy")


def virtual(seed: int) -> fedprior.Task:
    """The digits, divided anew; the test digits are with the first clients, as the tests are the server's."""
    task = fedprior.task("mnist-mini", seed=seed)
    draw, data = np.random.default_rng(seed), task.data
    train = [draw.choice(len(data.y), EACH, replace=False) for _ in range(CLIENTS)]
    tests = np.array_split(np.arange(len(data.test_y)), CLIENTS)
    data = replace(data, train=Shards.of(train), test=Shards.of(tests))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    return replace(task, data=data, network=Network(module, data.x[0]))


def main() -> None:
    """Train one run for each budget and seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", default="none,8,2", help="values of ε; none: only clipped")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", encoding="utf-8", newline="") as file:
        rows = csv.DictWriter(file, FIELDS, lineterminator="\n")
        rows.writeheader()
        for seed in map(int, given.seeds.split(",")):
            task = virtual(seed)
            chosen = fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.2)")
            for budget in given.budgets.split(","):
                private = {} if budget == "none" else {"epsilon": float(budget)}
                result = fedprior.run(task, chosen, **SETTINGS, **private, clip=given.clip, seed=seed)
                spent = result.summary.get("epsilon")
                settings = result.simulation.settings
                found = (
                    budget,
                    seed,
                    settings.noise_multiplier,
                    spent and round(spent, 3),
                    result.summary["global_accuracy"],
                )
                rows.writerow(dict(zip(FIELDS, found, strict=True)))
                file.flush()
                print(*found, flush=True)


if __name__ == "__main__":
    main()
