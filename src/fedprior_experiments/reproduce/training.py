"""Train the missing runs. Only this module trains."""

from collections.abc import Sequence

from rich.console import Console

from fedprior.core.errors import DivergedError
from fedprior.report.progress import RunProgress
from fedprior.runs import sweeps
from fedprior.runs.specs import Spec


def train(specs: Sequence[Spec], console: Console) -> None:
    """Train until each spec's folder holds a finished run or, beside its records, a diverged.txt with the reason.

    Unfinished runs continue from their checkpoints. On a GPU, runs that differ only in numbers train together. A run
    that diverges does not stop the others.
    """
    outcomes = sweeps.train(specs, lambda group, rounds: _watch(console, group, rounds))
    for spec, outcome in zip(specs, outcomes, strict=True):
        name = f"{spec.label}, seed {spec.seed}"
        if isinstance(outcome, DivergedError):
            console.print(f"{name}: {outcome}; going on with the others", highlight=False, markup=False, soft_wrap=True)
            continue
        last = outcome.summary
        accuracies = ", ".join(f"{kind} {100 * last[f'{kind}_accuracy_late']:.1f}%" for kind in ("global", "local"))
        console.print(f"{name}: {accuracies}, {last['seconds']:,.0f} s", highlight=False, markup=False, soft_wrap=True)


def _watch(console: Console, group: list[Spec], rounds: int) -> RunProgress:
    """Return one progress bar for runs that train together; a single run has its own."""
    labels = " and ".join(dict.fromkeys(spec.label for spec in group))
    label = f"{labels}, seed {group[0].seed}" if len(group) == 1 else f"{labels}, {len(group)} runs"
    return RunProgress(console, label, rounds)
