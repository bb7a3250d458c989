"""What the metrics of an evaluation cost: rounds with and without them in turn, in seconds of the processor.

python benchmarks/metrics_cost.py --rounds 20
"""

import argparse
import time

import fedprior
from fedprior.engines.build import build
from fedprior.engines.modes import engine, mode_of
from fedprior.runs.asked import assemble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="mnist-mini")
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each, of which every tenth is evaluated")
    chosen = parser.parse_args()
    spent = {"without": 0.0, "with": 0.0}
    engines = {}
    for name, metrics in (("without", ()), ("with", ("nll", "ece", "brier"))):
        parts = assemble(fedprior.task(chosen.task), chosen.algorithm, {"evaluate_every": 10, "metrics": metrics})
        sim = build(parts.algorithm, parts.task.network, parts.task.data, parts.settings)
        engines[name] = engine([sim], mode_of("auto", "auto", sim))
    for number in range(1, chosen.rounds + 1):
        for name in ("without", "with") if number % 2 else ("with", "without"):
            began = time.process_time()
            engines[name].step(evaluate=number % 10 == 0)
            spent[name] += time.process_time() - began
    ratio = spent["with"] / spent["without"]
    print(f"{spent['without']:.2f} s without, {spent['with']:.2f} s with metrics: {100 * (ratio - 1):+.1f}%")


if __name__ == "__main__":
    main()
