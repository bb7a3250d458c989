"""One HTML page of runs: it opens from disk, needs no network, and fits a phone.

The table, the settings and the commands are plain HTML, so that they can be read without scripts; `assets/page.js`
draws the rest from the same records, which the page holds as JSON.
"""

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from fedprior.core.errors import counted
from fedprior.core.files import write_atomically, writing
from fedprior.core.late import MEANS, is_number
from fedprior.report.page_data import UNITS, page_data, span
from fedprior.report.reading import SECTIONS
from fedprior.report.records import Broken, Group, Run, group_runs
from fedprior.report.run_tables import cells, header, more_of, score
from fedprior.version import __version__

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
<h1>{title}</h1>
<p class="soft">{subtitle}</p>
{trouble}
<div class="scroll">{table}</div>
<p class="soft">{means}</p>
<noscript><p>The plots need JavaScript; everything else on this page does not.</p></noscript>
<div class="chips" id="chips" role="group" aria-label="Runs to show"></div>
<h2>Accuracy against bytes</h2>
<p class="soft">Global: the server's model on everyone's test examples. Local: each client's own model, as it last sent
it, on its own. Bytes are those of the messages, both directions.</p>
<div class="grid" id="accuracy-bytes"></div>
<h2>Accuracy against rounds</h2>
<div class="grid" id="accuracy-rounds"></div>
<section id="scores-section">
<h2>Held-out loss and metrics</h2>
<div class="grid" id="scores"></div>
</section>
<section id="probabilities-section">
<h2>Can its probabilities be believed?</h2>
<p class="soft">Negative log-likelihood, expected calibration error and Brier score: less is better. The diagram is of
the server's model at the last evaluation: test examples in fifteen equal parts by confidence, and the accuracy of each.
A model below the diagonal is too sure of itself.</p>
<div class="grid" id="probabilities"></div>
</section>
<h2>Sparsity</h2>
<p class="soft">The share of the parameters that is not part of the server's network any more.</p>
<div class="grid" id="sparsity"></div>
<section id="units-section">
<h2>Units, layer by layer</h2>
<p class="soft">A unit closes when its gate's θ falls to ε. By votes: clients' gates raised its threshold by more than
the server's step shrank its weights; by the step: the other way round, so no client voted for it.</p>
<div class="grid" id="units"></div>
{units}
</section>
<section id="agreement-section">
<h2>Gate agreement</h2>
<p class="soft">How far the clients' gate probabilities π are from the server's θ: total variation, over gates and the
round's clients. Near zero, all agree on which units the network needs.</p>
<div class="grid" id="agreement"></div>
</section>
<h2>What it costs</h2>
<div class="grid" id="cost"></div>
<section id="partition-section">
<h2>Who has what</h2>
<p class="soft">The stronger a cell's colour, the larger the share of the client's training examples that is of that
class.</p>
<div class="grid" id="partition"></div>
</section>
<h2>Settings</h2>
<p class="soft">Settings that differ between the runs are bold.</p>
<div class="scroll">{settings}</div>
<h2>How to repeat it</h2>
{repeat}
<p class="soft">Made by fedprior {version} from the records of {count}.</p>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def page(runs: Sequence[Run], broken: Sequence[Broken] = (), repeat: Callable[[Run], str] | None = None) -> str:
    """The page as text; `repeat` says how to train a run again."""
    groups = group_runs(runs)
    assets = resources.files("fedprior.report").joinpath("assets")
    return TEMPLATE.format(
        title=html.escape(_title(groups)),
        subtitle=html.escape(_subtitle(runs)),
        trouble=_trouble(runs, broken),
        table=_table(groups),
        means=MEANS,
        units=_units(groups),
        settings=_settings(runs),
        repeat="\n".join(f"<pre>{html.escape(text)}</pre>" for text in _commands(runs, repeat)),
        version=__version__,
        count="1 run" if len(runs) == 1 else f"{len(runs)} runs",
        style=assets.joinpath("page.css").read_text(encoding="utf-8"),
        script=assets.joinpath("page.js").read_text(encoding="utf-8"),
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


def _table(groups: Sequence[Group]) -> str:
    """One row per run and, below a label's seeds, their mean and standard error."""
    lines, more = [], more_of([run for group in groups for run in group.runs])
    for number, group in enumerate(groups):
        swatch = f'<span class="swatch" style="background:var(--c{number % 8})"></span>'
        for run in group.runs:
            lines.append(_row(cells(run, more), swatch, f'data-run="{html.escape(str(run.path))}"'))
        finished = replace(group, runs=tuple(run for run in group.runs if run.finished))
        if len({run.seed for run in finished.runs}) > 1:
            lines.append(_row(_mean_cells(finished, more), swatch, 'class="mean"'))
    head = "".join(f"<th>{name}</th>" for name in header(more))
    return f'<table class="runs" id="runs"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _row(texts: Sequence[str], swatch: str, attributes: str) -> str:
    first, *rest = (html.escape(text) for text in texts)
    return f"<tr {attributes}><td>{swatch}{first}</td>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>"


def _mean_cells(group: Group, more: Sequence[str]) -> list[str]:
    def cell(name: str, factor: float, unit: str = "") -> str:
        found = group.late(name) if name.endswith("accuracy") else group.final(name)
        if not math.isfinite(found.mean):
            return "–"
        error = f" ± {factor * found.error:,.1f}" if math.isfinite(found.error) else ""
        return f"{factor * found.mean:,.1f}{error}{unit}"

    accuracies = [cell(name, 100, "%") for name in ("global_accuracy", "local_accuracy")]
    traffic = [cell(name, 1e-6) for name in ("bytes_up", "bytes_down")]
    name = f"{group.label}, mean ± s.e."
    scores = [_mean_score(group, name) for name in more]
    return [name, "", "", *accuracies, *traffic, cell("sparsity", 100, "%"), "", cell("seconds", 1), *scores]


def _mean_score(group: Group, name: str) -> str:
    found = group.final(name)
    return score(found.mean) + (f" ± {score(found.error)}" if math.isfinite(found.error) else "")


def _units(groups: Sequence[Group]) -> str:
    """How many units each layer has kept, and why the others closed, as last recorded."""
    lines = []
    for number, group in enumerate(groups):
        swatch = f'<span class="swatch" style="background:var(--c{number % 8})"></span>'
        for run in group.runs:
            evaluated: list[Mapping[str, Any]] = [record for record in run.rounds if "sparsity" in record]
            last = evaluated[-1] if evaluated else {}
            for layer in (key.removeprefix("units/") for key in last if key.startswith("units/")):
                counts = [last.get(f"{name}/{layer}") for name in UNITS]
                texts = [run.label, str(run.seed), layer, *(f"{n:,}" if is_number(n) else "–" for n in counts)]
                lines.append(_row(texts, swatch, ""))
    if not lines:
        return ""
    head = "".join(
        f"<th>{name}</th>" for name in ("run", "seed", "layer", "units kept", "closed by votes", "by the step")
    )
    table = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table class="runs" id="closed">{table}</table></div>'


def _settings(runs: Sequence[Run]) -> str:
    """Every setting of every run, with those that differ in bold."""
    keys = dict.fromkeys(
        (section, key) for section in (*SECTIONS, "made") for run in runs for key in run.config.get(section, {})
    )
    head = "".join(f"<th>{html.escape(run.label)} {run.seed}</th>" for run in runs)
    lines = []
    for section, key in keys:
        values = [_plain(run.config.get(section, {}).get(key)) for run in runs]
        differs = ' class="differs"' if len(set(values)) > 1 else ""
        columns = "".join(f"<td>{html.escape(value)}</td>" for value in values)
        # On a phone a name breaks between its words.
        name = html.escape(f"{section}.{key}").replace(".", ".<wbr>").replace("_", "_<wbr>")
        lines.append(f"<tr{differs}><td>{name}</td>{columns}</tr>")
    return f'<table class="settings"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _plain(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _commands(runs: Sequence[Run], repeat: Callable[[Run], str] | None) -> list[str]:
    return [repeat(run) for run in runs] if repeat else [f"fedprior resume {run.path}" for run in runs]
