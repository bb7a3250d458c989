"""One HTML page of runs: it opens from disk, needs no network, and fits a phone.

The tables, the settings and the commands are plain HTML (`page_tables`), so that they can be read without scripts; the
scripts in `assets` draw the rest from the same records, which the page holds as JSON (`page_data`).
"""

import html
import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from fedprior.core.errors import counted
from fedprior.core.files import write_atomically, writing
from fedprior.core.late import MEANS
from fedprior.report.page_data import page_data, span
from fedprior.report.page_tables import commands, faults_table, runs_table, settings_tables, units_table
from fedprior.report.records import Broken, Group, Run, group_runs
from fedprior.version import __version__

SCRIPTS = ("base.js", "chart.js", "heatmap.js", "tables.js", "choose.js", "page.js")
"""The page's scripts in their order: each uses those before it."""

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="soft">{subtitle}</p>
{trouble}
{table}
<p class="soft">{means}</p>
<noscript><p>The plots need JavaScript; everything else on this page does not.</p></noscript>
<details class="bar" id="bar" hidden><summary><span id="shown"></span></summary>
<div class="bar-tools"><input type="search" id="filter" placeholder="Find runs" aria-label="Find runs by name">
<span class="tools" id="bar-tools"></span></div>
<div class="chips" id="chips" role="group" aria-label="Runs to show"></div></details>
{sections}
<h2>Settings</h2>
{settings}
<h2>How to repeat it</h2>
{repeat}
<p class="soft">Made by fedprior {version} from the records of {count}.</p>
</main>
<p class="unseen" id="said" role="status"></p>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


class Section(NamedTuple):
    """A part of the page: scripts draw into its grid. One with neither a figure nor a table is hidden."""

    place: str
    title: str
    note: str = ""
    table: Callable[[Sequence[Group]], str] | None = None


PARTS = (
    Section(
        "accuracy-bytes",
        "Accuracy against bytes",
        "Global: the server's model on everyone's test examples. Local: each client's own model, as it last sent it, "
        "on its own. Bytes are those of the messages, both directions.",
    ),
    Section("accuracy-rounds", "Accuracy against rounds"),
    Section("scores", "Held-out loss and metrics"),
    Section(
        "probabilities",
        "Can its probabilities be believed?",
        "Negative log-likelihood, expected calibration error and Brier score: less is better. The diagram is of the "
        "server's model at the last evaluation: test examples in fifteen equal parts by confidence, and the accuracy "
        "of each. A model below the diagonal is too sure of itself.",
    ),
    Section(
        "clients",
        "Every client",
        "At the last evaluation, on each client's own test examples: its own model, as it last sent it, and the "
        "server's. By size: means over tenths of the clients, from fewest to most training examples. The worst tenth, "
        "over rounds, is the mean over those that fare worst.",
    ),
    Section("sparsity", "Sparsity", "The share of the parameters that is not part of the server's network any more."),
    Section(
        "units",
        "Units, layer by layer",
        "A unit closes when its gate's θ falls to ε. By votes: clients' gates raised its threshold by more than the "
        "server's step shrank its weights; by the step: the other way round, so no client voted for it.",
        units_table,
    ),
    Section(
        "agreement",
        "Gate agreement",
        "How far the clients' gate probabilities π are from the server's θ: total variation, over gates and the "
        "round's clients. Near zero, all agree on which units the network needs.",
    ),
    Section("cost", "What it costs"),
    Section(
        "devices",
        "Faults of devices",
        "Replies that were refused or did not come. The round went on without them. A quarantined device is not asked "
        "again; one that is late was not waited for; a clipped upload was shortened to the bound.",
        faults_table,
    ),
    Section(
        "partition",
        "Who has what",
        "The stronger a cell's colour, the larger the share of the client's training examples that is of that class.",
    ),
)
"""What the page shows between the table of results and the settings, in this order."""


def page(runs: Sequence[Run], broken: Sequence[Broken] = (), repeat: Callable[[Run], str] | None = None) -> str:
    """The page as text; `repeat` says how to train a run again."""
    groups = group_runs(runs)
    assets = resources.files("fedprior.report").joinpath("assets")
    return TEMPLATE.format(
        title=html.escape(_title(groups)),
        subtitle=html.escape(_subtitle(runs)),
        trouble=_trouble(runs, broken),
        table=runs_table(groups),
        means=MEANS,
        sections="\n".join(_section(part, groups) for part in PARTS),
        settings=settings_tables(groups),
        repeat=commands(runs, repeat),
        version=__version__,
        count="1 run" if len(runs) == 1 else f"{len(runs)} runs",
        style=assets.joinpath("page.css").read_text(encoding="utf-8"),
        script="".join(assets.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS),
        # Only this could end a script element early.
        data=json.dumps(page_data(groups), allow_nan=False).replace("<", "\\u003c"),
    )


def write_page(
    path: Path, runs: Sequence[Run], broken: Sequence[Broken] = (), repeat: Callable[[Run], str] | None = None
) -> None:
    """Write the page to a file."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(runs, broken, repeat))


# ---------------------------------------------------------------------- plain HTML


def _section(part: Section, groups: Sequence[Group]) -> str:
    table = part.table(groups) if part.table else ""
    note = f'<p class="soft">{html.escape(part.note, quote=False)}</p>\n' if part.note else ""
    # Without scripts there are no figures.
    hidden = "" if table else " hidden"
    return (
        f'<section id="{part.place}-section" aria-labelledby="{part.place}-title"{hidden}>\n'
        f'<h2 id="{part.place}-title">{part.title}</h2>\n{note}'
        f'<div class="grid" id="{part.place}"></div>\n{table}\n</section>'
    )


def _title(groups: Sequence[Group]) -> str:
    tasks = list(dict.fromkeys(group.task for group in groups))
    labels = list(dict.fromkeys(group.label for group in groups))
    named = ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")
    return f"{', '.join(tasks)}: {named}" if groups else "No runs"


def _subtitle(runs: Sequence[Run]) -> str:
    if not runs:
        return "None of the folders holds a run that can be read."
    rounds = span(run.planned for run in runs)
    cohorts = [n for run in runs if isinstance(n := run.config["run"].get("clients_per_round"), int)]
    devices = ", ".join(sorted({str(run.summary["device"]) for run in runs if run.summary and "device" in run.summary}))
    clients = {len(run.partition.train) for run in runs if run.partition}
    of = f" of {span(clients)}" if clients else ""
    cohort = f"{span(cohorts)}{of} clients per round" if cohorts else ""
    parts = [counted(rounds, "round"), cohort, f"seed {span(run.seed for run in runs)}", devices]
    return " · ".join(part for part in parts if part)


def _trouble(runs: Sequence[Run], broken: Sequence[Broken]) -> str:
    """What is missing from each run, and why."""
    lines = [f"{b.path}: {b.reason}" for b in broken]
    for run in runs:
        if not run.finished:
            why = run.trouble or "still running, or stopped (fedprior resume continues it)"
            lines.append(f"{run.path}: round {len(run.rounds)} of {run.planned}: {why}")
    if not lines:
        return ""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<div class="trouble" id="trouble"><strong>Not finished or not readable</strong><ul>{items}</ul></div>'
