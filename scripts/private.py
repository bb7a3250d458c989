"""What privacy costs in accuracy where there are many clients: 10,000 virtual ones on the embedded digits.

    python scripts/private.py --out results/private/clients10000.csv
    python scripts/private.py --budgets 8 --clips 0.05,0.5,5 --quantiles none,0.5 \
        --out results/private/clips10000.csv

Every client has ten training digits of mnist-mini, drawn at random. There are 10,000 such digits, so a digit is with
about ten clients: the run shows what noise for 10,000 clients does to the model, and protects nobody's digits. The
network has one hidden layer of 32 units, 200 clients take part in a round on average. With `--quantiles`, the file also
says the clips of the first and the last round.
"""

import argparse
import csv
import itertools
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
ABOUT_CLIPS = ("clip", "quantile", "last_clip")


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


def row(task: fedprior.Task, seed: int, budget: str, clip: str, quantile: str) -> dict[str, object]:
    """Train one run."""
    chosen = fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.2)")
    private = {} if budget == "none" else {"epsilon": float(budget)}
    adaptive = {} if quantile == "none" else {"clip_quantile": float(quantile)}
    result = fedprior.run(task, chosen, **SETTINGS, **private, **adaptive, clip=float(clip), seed=seed)
    spent = result.summary.get("epsilon")
    return {
        "epsilon": budget,
        "clip": clip,
        "quantile": quantile,
        "seed": seed,
        "noise": result.simulation.settings.noise_multiplier,
        "spent": spent and round(spent, 3),
        "last_clip": round(result.records[-1].get("clip", float(clip)), 4),
        "accuracy": result.summary["global_accuracy"],
    }


def main() -> None:
    """Train one run for each seed, budget, quantile and clip."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", default="none,8,2", help="values of ε; none: only clipped")
    parser.add_argument("--clips", default="0.5")
    parser.add_argument("--quantiles", default="", help="quantiles that the clip follows; none: a fixed clip")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    names = (given.budgets, given.clips, given.quantiles or "none")
    with given.out.open("w", encoding="utf-8", newline="") as file:
        fields = FIELDS + ABOUT_CLIPS * bool(given.quantiles)
        rows = csv.DictWriter(file, fields, lineterminator="\n", extrasaction="ignore")
        rows.writeheader()
        for seed in map(int, given.seeds.split(",")):
            task = virtual(seed)
            for budget, clip, quantile in itertools.product(*(each.split(",") for each in names)):
                found = row(task, seed, budget, clip, quantile)
                rows.writerow(found)
                file.flush()
                print(*(found[name] for name in fields), flush=True)


if __name__ == "__main__":
    main()
