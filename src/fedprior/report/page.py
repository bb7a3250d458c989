"""One HTML page of runs: it opens from disk, asks no network for anything, and fits a phone.

The table, the settings and the commands are plain HTML, so that they can be read without scripts; `assets/page.js`
draws the rest from the same records, which lie in the page as JSON.
"""

import html
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fedprior.report.records import Broken, Group, Partition, Run, group_runs
from fedprior.report.table import COLUMNS, rows
from fedprior.report.watch import round_seconds
from fedprior.version import __version__

POINTS = 800
"""A line has about so many points; longer runs are shown by the means of consecutive rounds."""
PER_ROUND = ("bytes_up", "bytes_down", "train_loss")
PER_EVALUATION = ("global_accuracy", "local_accuracy", "sparsity", "tv_mean", "tv_max")

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
<noscript><p>The plots need JavaScript; everything else on this page does not.</p></noscript>
<div class="chips" id="chips" role="group" aria-label="Runs to show"></div>
<h2>Accuracy against bytes</h2>
<p class="soft">Global: the server's model on everyone's test examples. Local: each client's own model, as it last sent
it, on its own. Bytes are those of the messages, both directions.</p>
<div class="grid" id="accuracy-bytes"></div>
<h2>Accuracy against rounds</h2>
<div class="grid" id="accuracy-rounds"></div>
<h2>Sparsity</h2>
<p class="soft">The share of the parameters that is not part of the server's network any more.</p>
<div class="grid" id="sparsity"></div>
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
<p class="soft">The darker a cell, the larger the share of the client's training examples that is of that class.</p>
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
        settings=_settings(runs),
        repeat="\n".join(f"<pre>{html.escape(text)}</pre>" for text in _commands(runs, repeat)),
        version=__version__,
        count="1 run" if len(runs) == 1 else f"{len(runs)} runs",
        style=assets.joinpath("page.css").read_text(encoding="utf-8"),
        script=assets.joinpath("page.js").read_text(encoding="utf-8"),
        # Inside a script element only this could end it early.
        data=json.dumps(_data(groups), allow_nan=False).replace("<", "\\u003c"),
    )


def write_page(
    path: Path, runs: Sequence[Run], broken: Sequence[Broken] = (), repeat: Callable[[Run], str] | None = None
) -> None:
    """The page as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(runs, broken, repeat), encoding="utf-8")


# ---------------------------------------------------------------------- plain HTML


def _title(groups: Sequence[Group]) -> str:
    tasks = list(dict.fromkeys(group.task for group in groups))
    labels = list(dict.fromkeys(group.label for group in groups))
    named = ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")
    return f"{', '.join(tasks)}: {named}" if groups else "No runs"


def _subtitle(runs: Sequence[Run]) -> str:
    if not runs:
        return "None of the folders holds a run that can be read."
    rounds = _span(run.planned for run in runs)
    cohort = _span(int(run.config["run"].get("clients_per_round", 0)) for run in runs)
    devices = ", ".join(sorted({str(run.summary["device"]) for run in runs if run.summary and "device" in run.summary}))
    clients = {len(run.partition.train) for run in runs if run.partition}
    of = f" of {_span(clients)}" if clients else ""
    parts = [f"{rounds} rounds", f"{cohort}{of} clients a round", f"seed {_span(run.seed for run in runs)}", devices]
    return " · ".join(part for part in parts if part)


def _span(values: Iterable[int]) -> str:
    known = sorted(set(values))
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"


def _trouble(runs: Sequence[Run], broken: Sequence[Broken]) -> str:
    """What is not there, run by run, and why."""
    lines = [f"{b.path}: {b.reason}" for b in broken]
    for run in runs:
        if not run.finished:
            why = run.trouble or "still running, or stopped; `fedprior resume` goes on"
            lines.append(f"{run.path}: round {len(run.rounds)} of {run.planned}: {why}")
    if not lines:
        return ""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<div class="trouble" id="trouble"><strong>Not finished or not readable</strong><ul>{items}</ul></div>'


def summary_of(run: Run) -> dict[str, Any]:
    """The run's summary; of an unfinished run, what its records say so far."""
    sizes = dict.fromkeys(("parameters", "effective_parameters"))
    seconds = round_seconds(run.path)
    found = {
        "label": run.label,
        **{name: run.final(name) for name in ("global_accuracy", "local_accuracy", "sparsity")},
        **{name: sum(record[name] for record in run.rounds) for name in ("bytes_up", "bytes_down")},
        "seconds": sum(seconds.values()) if seconds else None,
    }
    return {**sizes, **found, **(run.summary or {}), "rounds": len(run.rounds)}


def _table(groups: Sequence[Group]) -> str:
    """A row a run, and under several seeds of a label their mean and standard error."""
    lines = []
    names = (*COLUMNS[:1], "seed", "rounds", *COLUMNS[1:])
    for number, group in enumerate(groups):
        swatch = f'<span class="swatch" style="background:var(--c{number % 8})"></span>'
        for run in group.runs:
            cells = rows([summary_of(run)])[0]
            cells = [*cells[:1], str(run.seed), f"{len(run.rounds):,}", *cells[1:]]
            lines.append(_row(cells, swatch, f'data-run="{html.escape(str(run.path))}"'))
        finished = replace(group, runs=tuple(run for run in group.runs if run.finished))
        if len({run.seed for run in finished.runs}) > 1:
            lines.append(_row(_mean_cells(finished), swatch, 'class="mean"'))
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<table class="runs" id="runs"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _row(cells: Sequence[str], swatch: str, attributes: str) -> str:
    first, *rest = (html.escape(cell) for cell in cells)
    return f"<tr {attributes}><td>{swatch}{first}</td>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>"


def _mean_cells(group: Group) -> list[str]:
    def cell(name: str, factor: float, unit: str = "") -> str:
        found = group.final(name)
        if not math.isfinite(found.mean):
            return "–"
        error = f" ± {factor * found.error:,.1f}" if math.isfinite(found.error) else ""
        return f"{factor * found.mean:,.1f}{error}{unit}"

    accuracies = [cell(name, 100, "%") for name in ("global_accuracy", "local_accuracy")]
    traffic = [cell(name, 1e-6) for name in ("bytes_up", "bytes_down")]
    name = f"{group.label}, mean ± s.e."
    return [name, "", "", *accuracies, *traffic, cell("sparsity", 100, "%"), "", cell("seconds", 1)]


def _settings(runs: Sequence[Run]) -> str:
    """Every setting of every run, those that differ in bold."""
    keys: dict[tuple[str, str], None] = {}
    for run in runs:
        keys |= dict.fromkeys(
            (table, key) for table in ("run", "task", "algorithm", "made") for key in run.config.get(table, {})
        )
    head = "".join(f"<th>{html.escape(run.label)} {run.seed}</th>" for run in runs)
    lines = []
    for table, key in keys:
        values = [_plain(run.config.get(table, {}).get(key)) for run in runs]
        differs = ' class="differs"' if len(set(values)) > 1 else ""
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in values)
        lines.append(f"<tr{differs}><td>{html.escape(f'{table}.{key}')}</td>{cells}</tr>")
    return f'<table class="settings"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _plain(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _commands(runs: Sequence[Run], repeat: Callable[[Run], str] | None) -> list[str]:
    return [repeat(run) for run in runs] if repeat else [f"fedprior resume {run.path}" for run in runs]


# ---------------------------------------------------------------------- what the script draws


def _data(groups: Sequence[Group]) -> dict[str, Any]:
    several = len({group.task for group in groups}) > 1
    found = []
    for group in groups:
        name = f"{group.task} {group.label}" if several else group.label
        seeds = [run.seed for run in group.runs]
        for run in group.runs:
            # A seed tells runs of a label apart; where it does not, the folder does.
            which = "" if len(seeds) == 1 else f" ({run.seed})" if seeds.count(run.seed) == 1 else f" ({run.path})"
            found.append(_run_data(run, name, name + which))
    return {"runs": found, "partitions": _partitions([run for group in groups for run in group.runs])}


def _run_data(run: Run, group: str, name: str) -> dict[str, Any]:
    evaluated = [record for record in run.rounds if "global_accuracy" in record]
    evaluated = evaluated[:: max(1, len(evaluated) // POINTS)] + evaluated[-1:] * (len(evaluated) > POINTS)
    sent = run.series("gib")
    layers = sorted({key for record in evaluated for key in record if key.startswith("sparsity/")}, key=_natural(run))
    seconds = round_seconds(run.path)
    per_round: dict[str, Sequence[Any]] = {name: [record.get(name) for record in run.rounds] for name in PER_ROUND}
    if seconds:
        per_round["seconds"] = [seconds.get(record["round"]) for record in run.rounds]
    return {
        "name": name,
        "group": group,
        **_thinned([record["round"] for record in run.rounds], per_round),
        "evaluated": {
            "round": [record["round"] for record in evaluated],
            "bytes": [round(sent[record["round"]] * 2**30) for record in evaluated],
            **{
                name: [_number(record.get(name)) for record in evaluated]
                for name in PER_EVALUATION
                if any(record.get(name) is not None for record in evaluated)
            },
        },
        # A layer is not named before its first weight is gone.
        "layers": {key.removeprefix("sparsity/"): [_number(r.get(key, 0.0)) for r in evaluated] for key in layers},
    }


def _natural(run: Run) -> Callable[[str], int]:
    """Layers in the order of the network, which is the order in which records name them."""
    order = {key: i for record in run.rounds for i, key in enumerate(record)}
    return lambda key: order[key]


def _thinned(rounds: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Each column, by the means of so many consecutive rounds that the points stay few."""
    width = max(1, -(-len(rounds) // POINTS))
    starts = range(0, len(rounds), width)
    thin: dict[str, list[Any]] = {"round": [rounds[min(start + width, len(rounds)) - 1] for start in starts]}
    for name, values in columns.items():
        parts = [[v for v in values[start : start + width] if _number(v) is not None] for start in starts]
        thin[name] = [_number(float(np.mean(part))) if part else None for part in parts]
    return thin


def _partitions(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every different partition once."""
    found: dict[str, tuple[Partition, list[Run]]] = {}
    for run in runs:
        if run.partition is not None and run.partition.classes > 0:
            found.setdefault(run.partition.fingerprint, (run.partition, []))[1].append(run)
    pictures = []
    for part, sharing in found.values():
        shares = part.train / np.maximum(part.train.sum(1, keepdims=True), 1)
        top = shares.argmax(1)
        order = np.lexsort((-shares.max(1), top))
        seeds, sizes = _span(run.seed for run in sharing), [int(counts.sum()) for counts in (part.train, part.test)]
        pictures.append(
            {
                "title": f"{sharing[0].task}, seed {seeds}",
                "note": f"{sizes[0]:,} training and {sizes[1]:,} test examples, partition {part.fingerprint}",
                "counts": part.train[order].tolist(),
                "order": order.tolist(),
            }
        )
    return pictures


def _number(value: Any) -> float | None:
    """JSON has no NaN."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
