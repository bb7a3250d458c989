"""The page's tables: runs, closed units, faults, settings. Plain HTML; scripts add sorting by a header."""

import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedprior.core.late import is_number
from fedprior.report.faults import NOTED, faults_of
from fedprior.report.page_data import UNITS, group_names, span
from fedprior.report.reading import SECTIONS
from fedprior.report.records import Group, Run
from fedprior.report.run_tables import PERCENT, cells, header, more_of, score

ALSO = {"task": "", "wire": "float32", "mode": "auto"}
"""Settings of a run that stand in the table of runs where runs differ in them, and what older runs had."""
SMALL = re.compile(r"(, mean ± s\.e\.$| ± [\d.,e+-]+)")
"""What is less than the rest of a cell."""
FEW = 6
"""As many commands are shown; more are folded."""


def _sortable(identity: str, caption: str, names: Sequence[str], bodies: Sequence[str]) -> str:
    """A table whose headers are buttons when scripts run, in a frame that scrolls by keyboard too."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in names)
    return (
        f'<div class="scroll" role="region" aria-label="{html.escape(caption)}" tabindex="0">'
        f'<table class="runs" id="{identity}" data-sortable><caption class="unseen">{html.escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>{''.join(bodies)}</table></div>"
    )


def _body(rows: Sequence[str], attributes: str = "") -> str:
    return f"<tbody{' ' * bool(attributes)}{attributes}>{''.join(rows)}</tbody>"


def _row(texts: Sequence[str], swatch: str = "", attributes: str = "") -> str:
    """A row that its first cell names; errors are small beside their means."""
    first, *rest = (SMALL.sub(r"<small>\1</small>", html.escape(text)) for text in texts)
    cells = "".join(f"<td>{cell}</td>" for cell in rest)
    return f'<tr{" " * bool(attributes)}{attributes}><th scope="row">{swatch}{first}</th>{cells}</tr>'


def _swatch(number: int) -> str:
    """The place of a group's line, which the script draws as in the charts."""
    return f'<span class="swatch" data-look="{number}"></span>'


# ---------------------------------------------------------------------- runs


def runs_table(groups: Sequence[Group]) -> str:
    """One row per run; a label's seeds stand below their mean and standard error."""
    runs = [run for group in groups for run in group.runs]
    more, also = more_of(runs), _also(runs)
    wrong = {id(run): len(faults_of(run).faults) for run in runs}
    wrong = wrong if any(wrong.values()) else {}
    bodies = []
    for number, (name, group) in enumerate(zip(group_names(groups), groups, strict=True)):
        finished = replace(group, runs=tuple(run for run in group.runs if run.finished))
        folded = len({run.seed for run in finished.runs}) > 1
        rows = [_row(_mean_cells(finished, more, also, wrong), _swatch(number), 'class="mean"')] if folded else []
        for run in group.runs:
            first, *rest = cells(run, more)
            about = [*_about(run, also), *([str(wrong[id(run)])] if wrong else [])]
            kind = 'class="seed" ' if folded else ""
            place = f'{kind}data-run="{html.escape(str(run.path))}" title="{html.escape(str(run.path))}"'
            rows.append(_row([first, *rest, *about], _swatch(number), place))
        bodies.append(_body(rows, f'data-group="{html.escape(name)}"'))
    names = [*header(more), *also, *(["faults"] if wrong else [])]
    return _sortable("runs", "Results of the runs", names, bodies)


def _also(runs: Sequence[Run]) -> list[str]:
    return [key for key in ALSO if len({_about(run, [key])[0] for run in runs}) > 1]


def _about(run: Run, also: Sequence[str]) -> list[str]:
    """The recorded settings; the engine that ran where `auto` was asked for."""
    values = {**ALSO, **run.config["run"]}
    values |= {"mode": (run.summary or {}).get("mode", values["mode"])}
    return [str(values[key]) for key in also]


def _mean_cells(group: Group, more: Sequence[str], also: Sequence[str], wrong: Mapping[int, int]) -> list[str]:
    def cell(name: str, factor: float, unit: str = "") -> str:
        found = group.late(name) if name.endswith("accuracy") else group.final(name)
        if not math.isfinite(found.mean):
            return "–"
        error = f" ± {factor * found.error:,.1f}" if math.isfinite(found.error) else ""
        return f"{factor * found.mean:,.1f}{error}{unit}"

    seeds, rounds = span(run.seed for run in group.runs), span(len(run.rounds) for run in group.runs)
    accuracies = [cell(name, 100, "%") for name in ("global_accuracy", "local_accuracy")]
    traffic = [cell(name, 1e-6) for name in ("bytes_up", "bytes_down")]
    size = group.final("effective_parameters").mean
    scores = [_mean_score(group, name) for name in more]
    about = [", ".join(dict.fromkeys(_about(run, [key])[0] for run in group.runs)) for key in also]
    faults = [str(sum(wrong[id(run)] for run in group.runs))] if wrong else []
    numbers = [*accuracies, *traffic, cell("sparsity", 100, "%"), f"{size:,.0f}" if math.isfinite(size) else "–"]
    return [f"{group.label}, mean ± s.e.", seeds, rounds, *numbers, cell("seconds", 1), *scores, *about, *faults]


def _mean_score(group: Group, name: str) -> str:
    found = group.final(name)
    if name in PERCENT and math.isfinite(found.mean):
        error = f" ± {100 * found.error:.1f}" if math.isfinite(found.error) else ""
        return f"{100 * found.mean:.1f}{error}%"
    return score(found.mean) + (f" ± {score(found.error)}" if math.isfinite(found.error) else "")


# ---------------------------------------------------------------------- units and faults


def units_table(groups: Sequence[Group]) -> str:
    """How many units each layer has kept, and why the others closed, as last recorded."""
    rows = []
    for number, group in enumerate(groups):
        for run in group.runs:
            evaluated: list[Mapping[str, Any]] = [record for record in run.rounds if "sparsity" in record]
            last = evaluated[-1] if evaluated else {}
            for layer in (key.removeprefix("units/") for key in last if key.startswith("units/")):
                counts = [last.get(f"{name}/{layer}") for name in UNITS]
                texts = [run.label, str(run.seed), layer, *(f"{n:,}" if is_number(n) else "–" for n in counts)]
                rows.append(_row(texts, _swatch(number)))
    names = ("run", "seed", "layer", "units kept", "closed by votes", "by the step")
    return _sortable("closed", "Units that each layer keeps", names, [_body([row]) for row in rows]) if rows else ""


def faults_table(groups: Sequence[Group]) -> str:
    """Devices with faults, run by run: how many, when last, and what was wrong then; and how often each was noted."""
    wrong = {id(run): faults_of(run) for group in groups for run in group.runs}
    noted = [name for name in NOTED if any(name in faults.noted for faults in wrong.values())]
    rows = []
    for number, group in enumerate(groups):
        for run in group.runs:
            faults = wrong[id(run)]
            for device, count in faults.by_device.items():
                when, what = faults.last(device)
                said = [_rounds(faults.rounds(name, device), name) for name in noted]
                texts = [run.label, str(run.seed), device, f"{count:,}", *said, f"{when:,}", what]
                rows.append(_row(texts, _swatch(number)))
    also = ["quarantined in round" if name == "quarantined" else NOTED[name] for name in noted]
    names = ("run", "seed", "device", "faults", *also, "last in round", "what was wrong")
    return _sortable("faults", "Faults of devices", names, [_body([row]) for row in rows]) if rows else ""


def _rounds(rounds: Sequence[int], name: str) -> str:
    """How often a device was noted; when it was quarantined."""
    return (", ".join(map(str, rounds)) or "–") if name == "quarantined" else f"{len(rounds):,}"


# ---------------------------------------------------------------------- settings and commands


def settings_tables(groups: Sequence[Group]) -> str:
    """What differs, a row per run and a column per setting; and what all runs share."""
    runs = [run for group in groups for run in group.runs]
    keys = dict.fromkeys(
        (section, key) for section in (*SECTIONS, "made") for run in runs for key in run.config.get(section, {})
    )
    values = {place: {_value(run, place) for run in runs} for place in keys}
    differ = [place for place, found in values.items() if len(found) > 1]
    shared = [(place, min(found)) for place, found in values.items() if len(found) == 1]
    parts = []
    if len(runs) > 1:
        names = ["run", *(_setting(place) for place in differ), "folder"]
        rows = [
            _row([run.label, *(_value(run, place) for place in differ), str(run.path)], _swatch(number))
            for number, group in enumerate(groups)
            for run in group.runs
        ]
        parts.append(_sortable("differ", "Settings that differ", names, [_body([row]) for row in rows]))
    lines = "".join(
        f"<div><dt>{_breaking(_setting(place))}</dt><dd>{html.escape(value)}</dd></div>" for place, value in shared
    )
    title = "Settings" if len(runs) == 1 else f"{len(shared)} settings that all runs share"
    opened = " open" if len(runs) == 1 else ""
    return "".join(parts) + f'<details{opened}><summary>{title}</summary><dl class="settings">{lines}</dl></details>'


def _setting(place: tuple[str, str]) -> str:
    return ".".join(place)


def _breaking(name: str) -> str:
    """On a phone a name breaks between its words."""
    return html.escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _value(run: Run, place: tuple[str, str]) -> str:
    section, key = place
    return _plain(run.config.get(section, {}).get(key))


def _plain(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def commands(runs: Sequence[Run], repeat: Callable[[Run], str] | None) -> str:
    """The command that trains each run again, folded where there are many."""
    texts = [repeat(run) if repeat else f"fedprior resume {run.path}" for run in runs]
    shown = "\n".join(f'<pre tabindex="0">{html.escape(text)}</pre>' for text in texts)
    if len(texts) <= FEW:
        return shown
    return f"<details><summary>{len(texts)} commands</summary>{shown}</details>"
