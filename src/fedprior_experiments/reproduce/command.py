"""`fedprior reproduce`: plan, train what is missing, print and write the table, draw the figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from fedprior.catalogue.algorithms import run_settings
from fedprior.engines import ranks
from fedprior.engines.build import device_of
from fedprior.report.figures import NoMatplotlibError
from fedprior.report.page import write_page
from fedprior.runs.repeat import repeat_command
from fedprior.runs.specs import missing
from fedprior_experiments.reproduce.comparison import terminal
from fedprior_experiments.reproduce.experiments import experiment as named_experiment
from fedprior_experiments.reproduce.planning import check_names, plan
from fedprior_experiments.reproduce.results import Results, read_results, shown_in
from fedprior_experiments.reproduce.training import train


def reproduce(
    name: str,
    seeds: Sequence[int],
    methods: Sequence[str] | None,
    out: Path,
    given: Mapping[str, str],
    console: Console,
    *,
    table_only: bool = False,
) -> Results:
    """Reproduce an experiment. Each run has its folder OUT/LABEL/seed-N; finished runs are kept, others continue.

    With `table_only` nothing is trained and no data is needed: table and figures come from the records in the folder,
    whatever their seeds. Besides the chosen methods, they show all methods with records in the folder.
    """
    experiment = named_experiment(name).chosen(methods)
    check_names(experiment, given)
    specs = plan(experiment, seeds, out, given)
    if not table_only:
        device_of(run_settings(specs[0].run))  # refuse before looking for the data
        left = missing(specs)
        if len(left) < len(specs):
            console.print(f"{len(specs) - len(left)} of {len(specs)} runs are there already", highlight=False)
        train(left, console)
    results = read_results(named_experiment(name).chosen(methods, shown_in(out)), out, given)
    if not ranks.first():
        return results
    console.print(terminal(results.table))
    for note in results.notes:
        console.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    page = out / "report.html"
    if results.groups:
        write_page(page, [run for group in results.groups for run in group.runs], repeat=repeat_command)
    paths = results.write_tables() + ([page] if results.groups else [])
    try:
        paths += results.write_figures()
    except NoMatplotlibError as error:
        console.print(f"no figures: {error}", highlight=False, markup=False, soft_wrap=True)
    for path in paths:
        if path.suffix in (".md", ".png", ".html"):
            console.print(str(path), highlight=False, markup=False, soft_wrap=True)
    return results
