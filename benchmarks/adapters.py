"""Adapters of rank 16: federated LoRA beside a spike and slab over components; the memory of a large frozen encoder.

    python benchmarks/adapters.py                    # three seeds, minutes on a CPU; --json keeps the records
    python benchmarks/adapters.py --memory           # 100 clients of a frozen encoder of 22 million parameters

The task is made of the embedded digits. A perceptron is trained on them in one place and frozen. Then twenty clients
have the same digits under other labels, and only adapters are trained.
"""

import argparse
import json
import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedprior
from fedprior.catalogue.data.embedded import mnist_mini

RANK, CLIENTS = 16, 20


def pretrained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """A perceptron after 1,500 steps on all digits."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(1500):
        some = torch.randint(len(x), (100,))
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[some]), y[some]).backward()
        optimiser.step()
    return net


def renamed_digits(seed: int) -> fedprior.Task:
    """The digits 0 … 9 become 1, 4, 7, 0, …, and every client has some of them."""
    x, y, test_x, test_y = (torch.as_tensor(values) for values in mnist_mini()[:4])
    net = pretrained(x, y, seed)
    y, test_y = (3 * y + 1) % 10, (3 * test_y + 1) % 10
    clients = [(x[i::CLIENTS], y[i::CLIENTS], test_x[i::CLIENTS], test_y[i::CLIENTS]) for i in range(CLIENTS)]
    settings: dict[str, Any] = {"batch_size": 20, "clients_per_round": 5, "local_steps": 15}
    return fedprior.own_task(fedprior.adapt(net, RANK), clients, name="renamed digits", **settings)


def compare(rounds: int, seeds: int) -> list[dict[str, Any]]:
    """One record a run: accuracy, bytes both ways, and the rank that each layer has in the end."""
    records = []
    for seed in range(seeds):
        task = renamed_digits(seed)
        for name, options in (("fedavg", {}), ("fedsparse-sized", {"sparsity": 0.55})):
            chosen = fedprior.algorithm(name, task.network, local_optimiser="Adam(lr=0.002)", **options)
            result = fedprior.run(task, chosen, rounds=rounds, evaluate_every=1, seed=seed)
            last = [record["global_accuracy"] for record in result.records[-10:]]
            records.append(
                {
                    "algorithm": name,
                    "seed": seed,
                    "accuracy": sum(last) / len(last),
                    "bytes": result.summary["bytes_up"] + result.summary["bytes_down"],
                    "ranks": [value for key, value in result.records[-1].items() if key.startswith("units/")],
                }
            )
            print(records[-1], flush=True)
    return records


class Classifier(nn.Module):
    """An encoder of the size of all-MiniLM-L6-v2: 30,522 words, six layers of 384, in all 22.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30_522, 384)
        layer = nn.TransformerEncoderLayer(384, 12, 1536, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(384, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.words(x)).mean(1))
        return out


def memory() -> None:
    """One round of 100 clients, all of them at once in a cohort; prints the process's largest resident memory."""
    torch.manual_seed(0)
    model = fedprior.adapt(Classifier(), RANK, targets=["linear1", "linear2"], train="head")
    x, y = torch.randint(30_522, (100, 12, 24)), torch.randint(8, (100, 12))
    task = fedprior.own_task(model, [(x[i, :8], y[i, :8], x[i, 8:], y[i, 8:]) for i in range(100)], batch_size=8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, options in (("fedavg", {}), ("fedsparse-sized", {"sparsity": 0.5})):
        chosen = fedprior.algorithm(name, task.network, **options)
        fedprior.run(task, chosen, rounds=1, clients_per_round=100, workers=2, evaluate_every=1)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    print(f"{frozen:,} frozen and {trained:,} trained parameters, a cohort of 100: {after / 2**20:.2f} GiB at most,")
    print(f"{before / 2**20:.2f} GiB of it before the first round")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.memory:
        memory()
        return
    records = compare(chosen.rounds, chosen.seeds)
    if chosen.json:
        chosen.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    for name in ("fedavg", "fedsparse-sized"):
        of = [record for record in records if record["algorithm"] == name]
        accuracy, sent = (sum(record[key] for record in of) / len(of) for key in ("accuracy", "bytes"))
        print(f"{name:16} {accuracy:6.2%} {sent / 1e6:8.1f} MB")


if __name__ == "__main__":
    main()
