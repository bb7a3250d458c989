"""Run an algorithm on every engine: the simulator, Flower's simulation, a TLS deployment, and one whose server dies.

    python scripts/flower_engines.py [--algorithms fedavg,fedsparse] [--engines simulation,deployment,killed]

There are three clients of mnist-mini, a few local steps, and one seed. For every engine, it prints the largest
difference between its final weights and the simulator's. `simulation` needs ray: pip install 'flwr[simulation]'.
"""

import argparse
import tempfile
import time
from pathlib import Path

import safetensors.torch
import torch

import fedprior
from fedprior.flower import named_job
from fedprior.flower.deploy import APP
from fedprior.flower.loopback import Loopback, end_on_signals
from fedprior.runs.folder import RunFolder

ROUNDS = {"simulation": 3, "deployment": 3, "killed": 5}


def job_config(algorithm: str, rounds: int) -> dict[str, str]:
    """The same job for every engine."""
    settings = f"clients=3; clients_per_round=3; rounds={rounds}; local_steps=10; evaluate_every=1; device=cpu"
    return {"task": "mnist-mini", "algorithm": algorithm, "settings": settings}


def simulated(algorithm: str, rounds: int, folder: Path) -> Path:
    """Run fedprior's own simulator."""
    job = named_job(job_config(algorithm, rounds))
    assert job.data is not None
    task = fedprior.Task(job.task, job.network, job.data, options=job.options)
    settings = {"clients_per_round": 3, "rounds": rounds, "local_steps": 10, "evaluate_every": 1, "device": "cpu"}
    fedprior.run(task, job.algorithm, out=folder, batch_size=job.settings.batch_size, workers=1, **settings)
    return folder


def deployed(engine: str, algorithm: str, folder: Path) -> Path:
    """Run the same job through Flower."""
    limits = {"round-seconds": 300.0, "wait-for": 3, "min-replies": 3}
    config = {**job_config(algorithm, ROUNDS[engine]), **limits}
    with Loopback(folder / "federation", simulation=engine == "simulation") as federation:
        for number in range(0 if federation.simulation else federation.nodes):
            federation.start_node(number)
        out = folder / "run"
        run = federation.run(APP, {**config, "out": str(out)})
        if engine == "killed":
            while len(RunFolder(out).records()) < 2:
                time.sleep(0.2)
            federation.kill("superlink")
            print("the server was killed after round", RunFolder(out).records()[-1]["round"], flush=True)
            federation.start_superlink()
            run = federation.run(APP, {**config, "resume": str(out)})
        federation.wait(run)
    return out


def difference(one: Path, other: Path) -> float:
    """The largest difference over all weights."""
    ours, theirs = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (one, other))
    return max(float((ours[name] - value).abs().max()) for name, value in theirs.items())


def main() -> None:
    """Run and print."""
    end_on_signals()
    # Use as many threads as the deployment's processes: sums that are split among cores round differently.
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--algorithms", default="fedavg,fedsparse")
    parser.add_argument("--engines", default=",".join(ROUNDS))
    given = parser.parse_args()
    for algorithm in given.algorithms.split(","):
        for engine in given.engines.split(","):
            with tempfile.TemporaryDirectory() as temporary:
                began, folder = time.monotonic(), Path(temporary)
                one = deployed(engine, algorithm, folder)
                other = simulated(algorithm, ROUNDS[engine], folder / "simulated")
                rounds = [record["round"] for record in RunFolder(one).records()]
                assert rounds == list(range(1, ROUNDS[engine] + 1)), rounds
                print(
                    f"{algorithm} {engine}: {len(rounds)} rounds, largest difference {difference(one, other):.3g}, "
                    f"{time.monotonic() - began:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
