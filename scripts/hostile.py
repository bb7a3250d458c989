"""Accuracy under hostile clients: every robust prior against every attack, with 10, 20 and 30% of the clients hostile.

    python scripts/hostile.py --out results/hostile/small.csv
    python scripts/hostile.py --network lenet5 --algorithms fedstudent --shares 0.2 --out results/hostile/lenet5.csv

    python scripts/hostile.py --out results/hostile/small.csv --table    # the table in docs/privacy.md

mnist-mini at its default partition, cohorts of 20. `small` is a network with one hidden layer of 32 units, which a
CPU trains in seconds; `lenet5` is the task's own. A run that is in the file already is not trained again. The file has
the global accuracy of every run and, where clients are poisoned, how often the backdoor works.
"""

import argparse
import csv
import itertools
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import fedprior
from fedprior.core.errors import DivergedError
from fedprior.core.network import Network
from fedprior.core.settings import RUN_OPTIONS
from fedprior.engines.attack import backdoor_success

ATTACKS = ("sign-flip", "scale", "constant", "backdoor")
SETTINGS = {"clients_per_round": 20, "device": "cpu"}
if "bound" in RUN_OPTIONS:  # uploads that are left out are not what is compared here
    SETTINGS["bound"] = 0.0
RUNS = {
    "fedavg": ("fedavg", {}),
    "fedavg, clip=1": ("fedavg", {"clip": 1.0}),
    "fedmedian": ("fedmedian", {}),
    "fedtrim": ("fedtrim", {}),
    "fedstudent": ("fedstudent", {}),
    "fedgeomedian": ("fedgeomedian", {}),
}
FIELDS = ("algorithm", "attack", "share", "seed", "accuracy", "backdoor")


def task_of(network: str, seed: int) -> fedprior.Task:
    """The digits, with their own network or a smaller one."""
    task = fedprior.task("mnist-mini", seed=seed)
    if network == "lenet5":
        return task
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    return replace(task, network=Network(module, task.data.x[0]))


def row(task: fedprior.Task, label: str, attack: str, share: float, seed: int, rounds: int, mode: str) -> dict:
    """Train one run. If it diverges, it has learned nothing."""
    name, own = RUNS[label]
    chosen = fedprior.algorithm(name, task.network, local_optimiser="SGD(lr=0.1)")
    settings = {**SETTINGS, **own, "rounds": rounds, "evaluate_every": rounds, "seed": seed, "mode": mode}
    settings |= {"attack": attack, "attackers": share} if share else {}
    found = dict(zip(FIELDS, (label, attack, share, seed, 0.0, ""), strict=True))
    try:
        result = fedprior.run(task, chosen, **settings)
    except DivergedError:
        return found
    found["accuracy"] = round(float(result.summary["global_accuracy"]), 4)
    if attack == "backdoor":
        with torch.no_grad():
            found["backdoor"] = round(backdoor_success(result.model, task.data.test_x, task.data.test_y), 4)
    return found


def table(path: Path) -> str:
    """Accuracy in percent over the seeds, with 10, 20 and 30% hostile clients, and how often the backdoor works."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    shares = sorted({row["share"] for row in rows} - {"0.0"})

    def mean(label: str, attack: str, share: str, field: str = "accuracy") -> str:
        mine = [row for row in rows if (row["algorithm"], row["attack"], row["share"]) == (label, attack, share)]
        known = [float(row[field]) for row in mine if row[field]]
        return f"{100 * sum(known) / len(known):.1f}" if known else "–"

    def each(label: str, attack: str, field: str = "accuracy") -> str:
        return " / ".join(mean(label, attack, share, field) for share in shares)

    lines = [["algorithm", "no attack", *ATTACKS, "backdoor works"]]
    for label in dict.fromkeys(row["algorithm"] for row in rows):
        found = [mean(label, "none", "0.0"), *(each(label, attack) for attack in ATTACKS)]
        lines.append([f"`{label}`", *found, each(label, "backdoor", "backdoor")])
    lines.insert(1, ["---", *["---:"] * (len(lines[0]) - 1)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Train what is missing in the file, and print each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=("small", "lenet5"), default="small")
    parser.add_argument("--algorithms", default=";".join(RUNS), help="separated by semicolons")
    parser.add_argument("--shares", default="0.1,0.2,0.3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="train nothing; print the table of the file")
    given = parser.parse_args()
    if given.table:
        print(table(given.out))
        return
    done = set()
    if given.out.exists():
        with given.out.open(encoding="utf-8", newline="") as file:
            done = {tuple(one[name] for name in FIELDS[:4]) for one in csv.DictReader(file)}
    else:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(",".join(FIELDS) + "\n", encoding="utf-8")
    hostile = [("none", 0.0), *itertools.product(ATTACKS, map(float, given.shares.split(",")))]
    for seed in map(int, given.seeds.split(",")):
        task = task_of(given.network, seed)
        mode = "in-turn" if given.network == "lenet5" else "vectorised"
        for label, (attack, share) in itertools.product(given.algorithms.split(";"), hostile):
            if (label, attack, str(share), str(seed)) in done:
                continue
            found = row(task, label, attack, share, seed, given.rounds, mode)
            with given.out.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, FIELDS).writerow(found)
            print(*found.values(), flush=True)


if __name__ == "__main__":
    main()
