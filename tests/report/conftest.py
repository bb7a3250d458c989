"""Run folders with made-up numbers of a realistic shape."""

import json

import numpy as np
import pytest

from fedprior.runs.folder import to_toml


def write_run(
    folder,
    *,
    label="fedavg",
    seed=0,
    rounds=200,
    top=0.7,
    local_top=0.86,
    sparsity=0.0,
    gates=False,
    parameters=878_538,
    clients=100,
    finished=True,
    task="cifar10",
    noise=0.008,
    every=10,
):
    """Accuracies that rise and level off, sparsity that is reached early, gates that come to agree."""
    random = np.random.RandomState(seed * 100 + len(label))
    folder.mkdir(parents=True)
    about = {"task": task, "algorithm": "fedsparse" if gates else "fedavg", "label": label}
    config = {"run": {**about, "seed": seed, "rounds": rounds}, "task": {}, "algorithm": {}}
    (folder / "config.toml").write_text(to_toml(config))
    records = []
    for number in range(1, rounds + 1):
        gone = sparsity * (1 - np.exp(-number / (0.04 * rounds)))
        sent = int(10 * 4 * parameters * (1 - gone))
        record = {"round": number, "bytes_up": sent, "bytes_down": sent, "train_loss": 2.3 / number**0.2}
        if number % every == 0 or number == rounds:
            rise = 1 - np.exp(-((number / (0.15 * rounds)) ** 0.6))
            record["global_accuracy"] = float(np.clip(0.1 + (top - 0.1) * rise + noise * random.randn(), 0, 1))
            record["local_accuracy"] = float(np.clip(0.3 + (local_top - 0.3) * rise + noise / 4 * random.randn(), 0, 1))
            record["sparsity"] = float(gone)
            if gates:
                record["tv_mean"] = float(0.05 * np.exp(-number / (0.05 * rounds)) + 0.002 * random.rand())
                record["tv_max"] = float(1 - 0.4 * number / rounds + 0.05 * random.randn() * (number > 30)).__abs__()
        records.append(record)
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if finished:
        last = {key: records[-1][key] for key in ("global_accuracy", "local_accuracy", "sparsity")}
        total = {key: sum(r[key] for r in records) for key in ("bytes_up", "bytes_down")}
        made = {**about, "seed": seed, "rounds": rounds, **last, **total, "parameters": parameters, "seconds": 1.0}
        (folder / "summary.json").write_text(json.dumps({**made, "device": "cpu", "version": "0"}))
    preferences = np.random.RandomState(seed).dirichlet(np.full(10, 0.1), clients)
    counts = [np.random.RandomState(i).multinomial(500, q).tolist() for i, q in enumerate(preferences)]
    held = {"fingerprint": "0" * 16, "classes": 10, "train": counts, "test": counts}
    (folder / "partition.json").write_text(json.dumps(held))
    return folder


PAPERLIKE = {
    "fedavg": {},
    "feddrop": {"top": 0.69, "local_top": 0.849, "parameters": 457_000},
    "fedl1": {"top": 0.62, "local_top": 0.825, "sparsity": 0.61},
    "fedsparse-low": {"top": 0.69, "local_top": 0.869, "sparsity": 0.21, "gates": True},
    "fedsparse-mid": {"top": 0.688, "local_top": 0.876, "sparsity": 0.47, "gates": True},
    "fedsparse-high": {"top": 0.683, "local_top": 0.869, "sparsity": 0.67, "gates": True},
}


@pytest.fixture(scope="session")
def paperlike(tmp_path_factory):
    """An experiment's folder with six methods and three seeds."""
    root = tmp_path_factory.mktemp("paperlike")
    for label, numbers in PAPERLIKE.items():
        for seed in range(3):
            write_run(root / label / f"seed-{seed}", label=label, seed=seed, **numbers)
    return root


@pytest.fixture(name="write_run")
def write_run_fixture():
    return write_run
