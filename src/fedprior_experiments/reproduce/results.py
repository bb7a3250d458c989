"""What an experiment's folder shows: the finished runs by method, what is wrong with the others, table and figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedprior.core.errors import RunError, counted
from fedprior.core.settings import MACHINE
from fedprior.report import figures
from fedprior.report.records import Group, Run, find_runs, group_runs
from fedprior.report.table import Table, write_tables
from fedprior.runs.specs import Spec, differences
from fedprior_experiments.reproduce.comparison import comparison, numbers
from fedprior_experiments.reproduce.experiments import Experiment
from fedprior_experiments.reproduce.planning import plan


@dataclass(frozen=True)
class Results:
    """The finished runs of an experiment. `groups` has one group per method with runs, in the experiment's order."""

    experiment: Experiment
    out: Path
    groups: list[Group]
    notes: list[str]
    """What a reader of the table should know: runs that diverged, are unfinished or broken, or differ from others."""

    @property
    def title(self) -> str:
        """What was trained, for how long, where and with what."""
        runs = [run for group in self.groups for run in group.runs]
        rounds = sorted({run.planned for run in runs})
        length = counted(" or ".join(f"{r:,}" for r in rounds), "round")
        if rounds != [self.experiment.rounds]:
            length += f" (the experiment has {self.experiment.rounds:,})"
        clients = {run.config["partition"]["clients"] for run in runs if "clients" in run.config.get("partition", {})}
        seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
        places = {str(run.summary["device"]) for run in runs if run.summary and "device" in run.summary}
        versions = {f"fedprior {run.summary['version']}" for run in runs if run.summary and "version" in run.summary}
        crowd = [" or ".join(f"{count:,}" for count in sorted(clients)) + " clients"] if clients else []
        about = [*crowd, length, f"seeds {seeds}", *sorted(places), *sorted(versions)] if runs else ["no finished runs"]
        return f"{self.experiment.title}: {', '.join(about)}"

    @property
    def table(self) -> Table:
        """The table of our results beside the paper's."""
        return comparison(self.title, self.experiment, self.groups, self.notes)

    def write_tables(self) -> list[Path]:
        """Write table.md, table.tex and table.csv to the experiment's folder."""
        return write_tables(self.out, self.table, numbers(self.experiment, self.groups))

    def write_figures(self) -> list[Path]:
        """Draw the paper's figures, as far as there are records for them, into the folder `figures`."""
        names = {one.label: figures.Name(one.name, one.variant_of) for one in self.experiment.methods}
        pair = self.experiment.pruning or ()
        compared = [group for group in self.groups if group.label not in pair[1:]]
        pruned = [group for group in self.groups if group.label in pair]
        called = dict(zip(pair, map(figures.Name, ("with server pruning", "without")), strict=False))
        asked: figures.Asked = {
            "accuracy-gib": (figures.accuracy_against_bytes, compared),
            "accuracy-rounds": (figures.accuracy_against_rounds, compared),
            "sparsity": (figures.sparsity_over_rounds, [g for g in compared if g.final("sparsity").mean > 0]),
            # If the server decides the gates, the clients have the same ones, and there is nothing to see.
            "total-variation": (figures.total_variation, [g for g in compared if g.curve("tv_max").mean.any()]),
            "server-pruning": (
                lambda groups, _: figures.accuracy_against_rounds(groups, called),
                pruned if len(pruned) == 2 else [],
            ),
        }
        partitions = [run.partition for group in self.groups for run in group.runs if run.partition]
        return figures.write_figures(self.out / "figures", asked, names, partitions[:1])


def shown_in(out: Path) -> set[str]:
    """Return the labels for which a folder has records."""
    return {run.label for run in find_runs(out).runs}


def read_results(experiment: Experiment, out: Path, given: Mapping[str, str] = MappingProxyType({})) -> Results:
    """Read the folder, without data or a GPU, and compare its runs with the experiment under the `given` settings."""
    found = find_runs(out)
    order = {method.label: number for number, method in enumerate(experiment.methods)}
    of_it = [run for run in found.runs if run.task == experiment.task and run.label in order]
    if not of_it:
        raise RunError(f"{out} has no run of {experiment.name}: make some, or say where they are (--out)")
    specs = plan(experiment, sorted({run.seed for run in of_it}), out, given)
    expected = {(spec.label, spec.seed): spec for spec in specs}
    mine, misplaced = _in_their_place(of_it, expected)
    if not mine:
        raise RunError(f"{out} has no run of {experiment.name} where they are kept, {out}/LABEL/seed-N")
    done = [run for run in mine if run.finished]
    groups = sorted(group_runs(done), key=lambda group: order[group.label])
    notes = [
        *(f"{broken.path}: {broken.reason}" for broken in found.broken),
        *misplaced,
        *_unfinished(mine),
        *_different(done, [differences(run.config, expected[run.label, run.seed].config()) for run in done]),
        *(f"{group.label}: its runs differ in {', '.join(group.mixed)}" for group in groups if group.mixed),
        *_partitions(mine),
        *_changed(given),
    ]
    return Results(experiment, out, groups, notes)


def _in_their_place(runs: Sequence[Run], expected: Mapping[tuple[str, int], Spec]) -> tuple[list[Run], list[str]]:
    """Return the runs that are in the folder of their label and seed, and one line for each of the others."""
    kept = {run.path: expected[run.label, run.seed].out for run in runs}
    lines = [
        f"{run.path}: it is {run.label}, seed {run.seed}, which is kept in {kept[run.path]}; not in the table"
        for run in runs
        if run.path != kept[run.path]
    ]
    return [run for run in runs if run.path == kept[run.path]], lines


def _unfinished(runs: Sequence[Run]) -> list[str]:
    """Say how far the unfinished runs are, or why they will never finish."""
    return [
        f"{run.label}, seed {run.seed}: "
        f"{run.trouble or f'unfinished, {len(run.rounds):,} of {run.planned:,} rounds'}; not in the table"
        for run in runs
        if not run.finished
    ]


def _different(runs: Sequence[Run], found: Sequence[list[tuple[str, Any, Any]]]) -> list[str]:
    """Say which settings differ from the experiment's. A difference that all runs share is mentioned once."""
    seen: dict[str, list[str]] = {}
    for run, others in zip(runs, found, strict=True):
        for key, was, now in others:
            seen.setdefault(f"{key} = {was}, not {now}", []).append(f"{run.label}, seed {run.seed}")
    return [
        f"{name}: {what}"
        for what, names in seen.items()
        for name in (["all runs"] if 1 < len(names) == len(runs) else names)
    ]


def _changed(given: Mapping[str, str]) -> list[str]:
    """Say which settings the user changed from the experiment's; rounds are in the title."""
    return [f"with {key}={value}" for key, value in given.items() if key not in MACHINE | {"rounds"}]


def _partitions(runs: Sequence[Run]) -> list[str]:
    """Say which seeds mix partitions. To compare methods on the same clients, all runs of a seed must share one."""
    seen: dict[int, set[str]] = {}
    for run in runs:
        if run.summary and run.summary.get("partition"):
            seen.setdefault(run.seed, set()).add(str(run.summary["partition"]))
    return [
        f"seed {seed}: its runs were made on different partitions" for seed, names in seen.items() if len(names) > 1
    ]
