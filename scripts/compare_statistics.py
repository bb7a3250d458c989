"""Evaluate finished runs with BatchNorm twice: with their stored statistics, and with those of the test batches.

    python scripts/compare_statistics.py RUN [RUN ...] --data-dir DIR --out results/cifar100/statistics.json

The weights are the same both times, so the difference is what shared statistics cost. Test batches have 1,000 images.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from fedprior.catalogue.tasks import recorded_task
from fedprior.core.batch_norm import MEAN, VARIANCE
from fedprior.report.reading import read_config

BATCH = 1000


def accuracies(run: Path, data_dir: str, device: str) -> dict[str, float]:
    """The global accuracy of a run's model with stored statistics, and with those of the batches."""
    config = read_config(run)
    task = recorded_task(config["run"]["task"], config["run"]["seed"], {**config["task"], "data_dir": data_dir})
    stored = {name: value.to(device) for name, value in load_file(run / "model.safetensors").items()}
    weights = {name: value for name, value in stored.items() if not name.endswith((MEAN, VARIANCE))}
    if len(weights) == len(stored):
        raise SystemExit(f"{run} stores no statistics: its network has no BatchNorm, or it has statistics=batch")
    task.network.module.to(device)
    rows = task.data.test.distinct
    correct = {"stored": 0, "batch": 0}
    with torch.no_grad():
        for part in rows.split(BATCH):
            x, y = task.data.test_x[part].to(device), task.data.test_y[part].to(device)
            for name, params in (("stored", stored), ("batch", weights)):
                correct[name] += int((task.network.predict(params, x).argmax(1) == y).sum())
    return {name: found / len(rows) for name, found in correct.items()}


def main() -> None:
    """Print the accuracies of every run, and write them down if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {}
    for run in given.runs:
        name = "/".join(run.parts[-2:])
        found[name] = accuracies(run, given.data_dir, given.device)
        print(name, *(f"{kind} {100 * value:.2f}" for kind, value in found[name].items()), flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
