"""Count the device operations of one vectorised round, by place: on a GPU, most of them are a kernel launch.

    python benchmarks/operations.py                                # FedAvg and FedSparse on every task
    python benchmarks/operations.py --tasks cifar100 --top 20      # which operations
    python benchmarks/operations.py --lines 20                     # which lines of fedprior
    python benchmarks/operations.py --set bound=0                  # without the bound on uploads

No GPU is needed. The round runs on a CPU with few examples (the same steps and layers, smaller batches), and we count
what torch dispatches, except views. Where fedprior has its own GPU kernel (draws from keys, gates, linear layers, batch
norms), we count its launches; `--plain` counts the CPU's operations instead. Convolutions, pools and group norms are
torch's own here and take several operations each. Products, sorts and reductions may be more than one launch, and the
counts say nothing about their duration. Compare them before and after a change; do not read them as milliseconds.
"""

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from contestants.tasks import LR, TASKS, Task
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fedprior
from fedprior.catalogue.algorithms import run_settings
from fedprior.core import batch_norm as core_batch_norm
from fedprior.core import keys
from fedprior.core.federated import FederatedData, Shards
from fedprior.core.operations import KNOWN
from fedprior.core.optimisers import TreeOptimiser
from fedprior.em.reception import TELLING
from fedprior.engines.build import build
from fedprior.engines.modes import engine
from fedprior.engines.stacked import together
from fedprior.kernels import batch_norm, concrete, gates, registration
from fedprior.kernels.mode import ROUTES

FREE = {
    "detach",
    "alias",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "unsqueeze_",
}
"""Operations, besides views, that launch nothing."""
PHASES = {
    (together.Together, "_speak"): "packets",
    (together.Together, "_conclude"): "M-step",
    (together.Together, "_scores"): "evaluation",
    (together.CohortBatches, "__init__"): "batches",
    (together.CohortBatches, "__getitem__"): "batches",
    (TreeOptimiser, "__init__"): "optimiser",
    (TreeOptimiser, "step"): "optimiser",
}
"""Functions whose operations are counted separately; the rest of the E-step is `steps`."""


class Counting(TorchDispatchMode):
    """Counts operations other than views by phase, by name and by the line of fedprior that called them."""

    def __init__(self, lines: bool) -> None:
        super().__init__()
        self.phases, self.names, self.lines = Counter[str](), Counter[str](), Counter[str]()
        self.stack, self.quiet, self.trace = ["other"], 0, lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not self.quiet and not func.is_view and name not in FREE and "::" not in name:
            self.count(name)
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> None:
        self.phases[self.stack[-1]] += 1
        self.names[f"{self.stack[-1]}: {name}"] += 1
        if self.trace:
            frames = [
                f for f in traceback.extract_stack() if "fedprior" in f.filename and "benchmarks" not in f.filename
            ]
            places = [f"{Path(f.filename).stem}:{f.lineno} {f.name}" for f in frames[-3:]]
            self.lines[" > ".join(places)] += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.stack.append(name)
        try:
            yield
        finally:
            self.stack.pop()


def counted(counting: Counting, owner: Any, name: str, phase: str) -> Any:
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with counting.phase(phase):
            return original(*args, **kwargs)

    return patch.object(owner, name, wrapper)


def once(counting: Counting, owner: Any, name: str, stand_in: Any = None, launches: Any = None) -> Any:
    """Count a function that a kernel replaces as one launch, or as `launches` of its arguments."""
    original = stand_in or getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for _ in range(0 if counting.quiet else launches(*args) if launches else 1):
            counting.count(f"kernel {name}")
        counting.quiet += 1
        try:
            return original(*args, **kwargs)
        finally:
            counting.quiet -= 1

    return patch.object(owner, name, wrapper)


class Registered:
    """The kernels for a CPU's tensors, between `start` and `stop`; what they launch is replaced below."""

    def start(self) -> None:
        takes = lambda x: x.dtype == torch.float32  # noqa: E731
        registration.register_for(takes, force=True, routes={F.linear: ROUTES[F.linear]})

    def stop(self) -> None:
        for operation in KNOWN:
            operation.fast = None


def norms(weights: Any) -> Tensor:
    """What `kernels.gates._norms` computes."""
    return torch.cat([w.flatten(2).square().sum(-1).sqrt() for w in weights], 1)


def pull(layers: Any, z: Tensor, grads: Any, tensors: Any) -> Any:
    """What `kernels.gates._scale_backward` computes."""
    return torch.func.vjp(lambda z, *t: gates.plain_scale(layers, z, t), z, *tensors)[1](tuple(grads))


def normalised(x: Tensor, mask: Any, weight: Any, bias: Any, eps: float) -> Any:
    """What `kernels.batch_norm.forward` computes."""
    names = ("x", "mask", "weight", "bias")
    given = {name: t for name, t in zip(names, (x, mask, weight, bias), strict=True) if t is not None}
    return torch.func.vmap(lambda t: core_batch_norm.normalise.plain(*map(t.get, names), eps))(given)


def slopes(grad: Tensor, x: Tensor, mask: Any, weight: Any, means: Tensor, variances: Tensor, eps: float) -> Any:
    """What `kernels.batch_norm.backward` computes."""
    return batch_norm._plain(grad, x, mask, weight, eps)


def alike(tensor: int) -> Any:
    """Stand in for a kernel of which only the shape matters: return something like one of its arguments."""
    return lambda *args: torch.sigmoid(args[tensor].clone())


def kernels_once(counting: Counting) -> list[Any]:
    """The launches of fedprior's own kernels. What a gate is worth does not matter to the count."""
    in_layers = {"launches": lambda layers, *_: -(-len(layers) // gates.LAYERS)}
    return [
        Registered(),
        *(once(counting, keys, name) for name in ("fold", "bits", "uniform", "dropout")),
        once(counting, gates, "_norms", norms, **in_layers),
        once(counting, gates, "_scale", gates.plain_scale, **in_layers),
        once(counting, gates, "_scale_backward", pull, **in_layers),
        once(counting, batch_norm.BatchNorm, "forward", normalised),
        once(counting, batch_norm.BatchNormGradient, "forward", slopes),
        once(counting, concrete.Logits, "forward", lambda n, v, *_: (v.clone(), v.sigmoid())),
        once(counting, concrete.LogitsGradient, "forward", alike(0)),
        once(counting, concrete.Concrete, "forward", alike(0)),
        once(counting, concrete.ConcreteGradient, "forward", alike(0)),
    ]


COHORT = TELLING + 1
"""As many clients as it takes for everything to be done that is done for a large cohort."""


def simulation(task: Task, algorithm: str, given: dict[str, str]) -> Any:
    """A round of few examples, with as many local steps as the task has."""
    small = replace(
        task, clients=COHORT + 1, cohort=COHORT, batch=2, examples=2 * -(-task.examples // task.batch), uneven=False
    )
    x, y, starts = small.data()
    rows = Shards(torch.arange(starts[-1]), torch.tensor(starts).numpy())
    data = FederatedData(x, y, x, y, rows, rows, small.classes)
    network = fedprior.Network(small.module(), x[0])
    usual = {"clients_per_round": small.cohort, "batch_size": small.batch, "device": "cpu", "workers": 1}
    # As on a GPU, one launch handles all tensors.
    options = {"local_optimiser": f"SGD(lr={LR}, foreach=True)"}
    if algorithm == "fedsparse":
        options |= {
            "local_threshold_optimiser": "Adamax(lr=0.001, foreach=True)",
            "server_optimiser": "Adam(lr=0.001, fused=True)",
            "server_threshold_optimiser": "Adamax(lr=0.01, foreach=True)",
        }
    built = fedprior.algorithm(algorithm, network, **options)
    return build(built, network, data, run_settings({**usual, **given}))


def measure(task: Task, algorithm: str, kernels: bool, lines: bool, given: dict[str, str]) -> Counting:
    """Measure the second round: the first creates constants and moments."""
    driver = engine([simulation(task, algorithm, given)], "vectorised")
    driver.step(evaluate=False)
    counting = Counting(lines)
    patches = [counted(counting, owner, name, phase) for (owner, name), phase in PHASES.items()]
    patches.append(counted(counting, together.protocol, "take_turn", "steps"))
    patches += kernels_once(counting) if kernels else []
    for each in patches:
        each.start()
    try:
        with counting:
            driver.step(evaluate=False)
    finally:
        for each in patches:
            each.stop()
    return counting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="cifar10,cifar100,pfl-cifar10", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--algorithms", default="fedavg,fedsparse")
    parser.add_argument("--plain", action="store_true", help="count what a CPU does")
    parser.add_argument("--top", type=int, default=0, help="how many of the most frequent operations to show")
    parser.add_argument("--lines", type=int, default=0, help="how many of the busiest lines of fedprior to show")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    chosen = parser.parse_args()
    given = dict(text.split("=", 1) for text in chosen.set)
    torch.set_num_threads(1)
    names = ["packets", "batches", "steps", "optimiser", "evaluation", "M-step", "other"]
    print(f"| task | algorithm | {' | '.join(names)} | all |\n| --- | --- |{' ---: |' * (len(names) + 1)}")
    found = {}
    for task in chosen.tasks.split(","):
        for algorithm in chosen.algorithms.split(","):
            counting = found[task, algorithm] = measure(
                TASKS[task], algorithm, not chosen.plain, chosen.lines > 0, given
            )
            cells = [str(counting.phases[name]) for name in names]
            print(f"| {task} | {algorithm} | {' | '.join(cells)} | {sum(counting.phases.values())} |", flush=True)
    for (task, algorithm), counting in found.items():
        for title, counts, number in (
            ("operations", counting.names, chosen.top),
            ("lines", counting.lines, chosen.lines),
        ):
            if number:
                print(f"\n{task}, {algorithm}: {title}")
                for name, count in counts.most_common(number):
                    print(f"{count:6d}  {name}")


if __name__ == "__main__":
    sys.exit(main())
