"""What the page's script draws, as plain data: lines of few enough points, layers, partitions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedprior.core.late import is_number
from fedprior.report.reading import Partition, round_seconds
from fedprior.report.records import Group, Run
from fedprior.report.run_tables import SCORES

POINTS = 800
"""About how many points a line has; longer runs are shown by the means of consecutive rounds."""
ALL_POINTS = 40_000
"""About how many points the lines of one chart have together; many runs have fewer each."""
ENOUGH = 0.9
"""Seeds are drawn as a mean if the shortest has this share of the longest's rounds: a mean ends where one does."""
COLOURS = 12
"""How many colours the style has; a test measures that they differ and can be seen."""
DASHES = ("", "7 3", "2 3", "9 3 2 3")
MARKS = ("circle", "square", "triangle", "diamond", "cross")
CLIENTS = 1000
"""About how many clients a partition's picture shows; if there are more, it shows every second, third, …"""
PER_ROUND = ("bytes_up", "bytes_down", "train_loss")
UNITS = ("units", "closed_by_votes", "closed_by_step")
"""For each layer, the units kept and, by cause, those that have closed so far."""
RELIABILITY = ("confidence", "accuracy")
"""The reliability diagram of an evaluation has one of each for every bin."""
UNSEEN = tuple(f"{who}_{name}" for who in ("unseen", "newcomer") for name in ("accuracy", "loss"))
"""Of clients that never took part: the server's model as it is, and after a newcomer's E-step."""
PER_EVALUATION = ("sparsity", "tv_mean", "tv_max", *UNSEEN)
NUMBERS_OF_A_LINE = (*PER_ROUND, *PER_EVALUATION, "seconds", "bytes")


def span(values: Iterable[int]) -> str:
    """One number, or the smallest and the largest."""
    known = sorted(set(values))
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"


def looks(count: int) -> list[dict[str, Any]]:
    """What tells that many lines apart: a colour, and for every dozen other dashes and another mark at the end."""
    return [
        {"colour": i % COLOURS, "dash": DASHES[i // COLOURS % len(DASHES)], "mark": MARKS[i // COLOURS % len(MARKS)]}
        for i in range(count)
    ]


def group_names(groups: Sequence[Group]) -> list[str]:
    """What legends call the groups: with several tasks, the task too."""
    several = len({group.task for group in groups}) > 1
    return [
        f"{group.task} {group.label}" if several and not group.label.startswith(group.task) else group.label
        for group in groups
    ]


def page_data(groups: Sequence[Group]) -> dict[str, Any]:
    """All data of the page: partitions, and runs in the order of their groups, which decides colours."""
    found, means, points = [], [], _points(sum(len(group.runs) for group in groups))
    for name, group in zip(group_names(groups), groups, strict=True):
        seeds = [run.seed for run in group.runs]
        # Seeds share their rounds, also when they are thinned.
        longest = max(len(run.rounds) for run in group.runs)
        drawn = []
        for run in group.runs:
            # The seed tells runs of one label apart; where it does not, the folder does.
            which = "" if len(seeds) == 1 else f" ({run.seed})" if seeds.count(run.seed) == 1 else f" ({run.path})"
            drawn.append(_run_data(run, name, name + which, max(1, -(-longest // points))))
        found += drawn
        if len(drawn) > 1 and min(len(run.rounds) for run in group.runs) >= ENOUGH * longest:
            means.append(mean_line(name, drawn))
    layers = max((len(run[part]) for run in found for part in ("layers", "units")), default=0)
    partitions = _partitions([run for group in groups for run in group.runs])
    return {"runs": found, "means": means, "looks": looks(max(len(groups), layers)), "partitions": partitions}


def _points(runs: int) -> int:
    """About how many points a line of so many runs has."""
    return max(POINTS // 8, min(POINTS, ALL_POINTS // max(runs, 1)))


def _run_data(run: Run, group: str, name: str, width: int) -> dict[str, Any]:
    evaluated = [record for record in run.rounds if "sparsity" in record]
    evaluated = _apart(evaluated, width)
    sent = run.series("gib")
    layers = sorted({key for record in evaluated for key in record if key.startswith("sparsity/")}, key=_natural(run))
    scores = dict.fromkeys(key for record in evaluated for key in record if key.startswith(SCORES))
    seconds = round_seconds(run.path)
    per_round: dict[str, Sequence[Any]] = {name: [record.get(name) for record in run.rounds] for name in PER_ROUND}
    if seconds:
        per_round["seconds"] = [seconds.get(record["round"]) for record in run.rounds]
    return {
        "name": name,
        "group": group,
        "task": run.task,
        **_thinned([record["round"] for record in run.rounds], per_round, width),
        "evaluated": {
            "round": [record["round"] for record in evaluated],
            "bytes": [round(sent[record["round"]] * 2**30) for record in evaluated],
            **{
                name: [_number(record.get(name)) for record in evaluated]
                for name in (*scores, *PER_EVALUATION)
                if any(record.get(name) is not None for record in evaluated)
            },
        },
        "reliability": [_numbered(evaluated[-1] if evaluated else {}, name) for name in RELIABILITY],
        "clients": clients_of(run),
        # A layer is not named before its first weight is gone.
        "layers": {key.removeprefix("sparsity/"): [_number(r.get(key, 0.0)) for r in evaluated] for key in layers},
        **{name: _by_layer(run, evaluated, f"{name}/") for name in UNITS},
    }


def clients_of(run: Run) -> dict[str, Any]:
    """The distribution over clients at the last evaluation, and means by the client's size; empty if nothing is known.

    Of accuracies or, where there are none, of losses: a client's own model, the server's, and what the own one gains.
    """
    table = run.clients
    name = "accuracy" if table and "accuracy" in table.columns else "loss"
    own, server = (table.last(column) for column in (name, f"server_{name}")) if table else (np.zeros(0),) * 2
    if not np.isfinite(own).any():
        return {}
    sorts = {"own": own, "server": server}
    quantiles = {
        kind: [_short(np.quantile(values[np.isfinite(values)], share)) for share in SHARES]
        for kind, values in sorts.items()
        if np.isfinite(values).any()
    }
    gain = own - server if name == "accuracy" else server - own
    return {"name": name, "share": SHARES, **quantiles, "by_size": _by_size(run, {"own": own, "gain": gain})}


SHARES = [i / 20 for i in range(21)]


def _by_size(run: Run, columns: Mapping[str, np.ndarray], parts: int = 10) -> dict[str, list[float | None]]:
    """Means over ten equal parts of the clients, from those with fewest training examples to those with most."""
    if run.partition is None or len(run.partition.train) != len(columns["own"]):
        return {}
    sizes = run.partition.train.sum(1)
    known = np.flatnonzero(np.isfinite(columns["own"]))
    split = [part for part in np.array_split(known[np.argsort(sizes[known], kind="stable")], parts) if len(part)]
    if np.ptp(sizes[known]) == 0:
        return {}
    means = {name: [_short(values[part].mean()) for part in split] for name, values in columns.items()}
    return {"size": [_short(sizes[part].mean()) for part in split], **means}


def _by_layer(run: Run, evaluated: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, list[float | None]]:
    """What the evaluations say about each layer under a prefix."""
    keys = sorted({key for record in evaluated for key in record if key.startswith(prefix)}, key=_natural(run))
    return {key.removeprefix(prefix): [_number(record.get(key)) for record in evaluated] for key in keys}


def _numbered(record: Mapping[str, Any], prefix: str) -> list[float | None]:
    """`prefix/1`, `prefix/2`, …, as a record has them, in order."""
    return [_number(value) for key, value in record.items() if key.startswith(f"{prefix}/")]


def _natural(run: Run) -> Callable[[str], int]:
    """Layers in the order of the network, which is the order in which records name them."""
    order = {key: i for record in run.rounds for i, key in enumerate(record)}
    return lambda key: order[key]


def _apart(evaluated: Sequence[Mapping[str, Any]], width: int) -> list[Mapping[str, Any]]:
    """The first evaluation in every stretch of so many rounds, and the last of all."""
    kept = {(record["round"] - 1) // width: record for record in reversed(evaluated[:-1])}
    return [*reversed(kept.values()), *evaluated[-1:]]


def mean_line(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of several seeds' lines, where all of them have a point, and its standard error."""
    evaluated = [run["evaluated"] for run in runs]
    return {"name": f"{name}, {len(runs)} seeds", "group": name, **_means(runs), "evaluated": _means(evaluated)}


def _means(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every column that all parts have, as means at the rounds that all have; their errors below `error`."""
    places = [{number: i for i, number in enumerate(part["round"])} for part in parts]
    rounds = sorted(set.intersection(*map(set, places)))
    names = [name for name in parts[0] if name in NUMBERS_OF_A_LINE or name.startswith(SCORES)]
    means: dict[str, Any] = {"round": rounds, "error": {}}
    for name in (name for name in names if all(name in part for part in parts)):
        # Nothing recorded is a NaN here, and makes its round's mean one.
        rows = np.array(
            [[part[name][place[r]] for part, place in zip(parts, places, strict=True)] for r in rounds], float
        )
        means[name] = [_short(mean) for mean in rows.mean(1)]
        means["error"][name] = [_short(error) for error in rows.std(1, ddof=1) / np.sqrt(len(parts))]
    return means


def _short(value: np.float64) -> float | None:
    """Seven digits, more than a line can show."""
    return _number(float(f"{value:.7g}"))


def _thinned(rounds: Sequence[int], columns: Mapping[str, Sequence[Any]], width: int) -> dict[str, list[Any]]:
    """Each column, averaged over so many consecutive rounds that the points stay few."""
    starts = range(0, len(rounds), width)
    thin: dict[str, list[Any]] = {"round": [rounds[min(start + width, len(rounds)) - 1] for start in starts]}
    for name, values in columns.items():
        parts = [[v for v in values[start : start + width] if _number(v) is not None] for start in starts]
        thin[name] = [_number(float(np.mean(part))) if part else None for part in parts]
    return thin


def _partitions(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each distinct partition once."""
    found: dict[str, tuple[Partition, list[Run]]] = {}
    for run in runs:
        if run.partition is not None and run.partition.classes > 0:
            found.setdefault(run.partition.fingerprint, (run.partition, []))[1].append(run)
    pictures = []
    for part, sharing in found.values():
        shares = part.train / np.maximum(part.train.sum(1, keepdims=True), 1)
        top = shares.argmax(1)
        order = np.lexsort((-shares.max(1), top))
        drawn = order[:: -(-len(order) // CLIENTS)]
        seeds, sizes = span(run.seed for run in sharing), [int(counts.sum()) for counts in (part.train, part.test)]
        pictures.append(
            {
                "title": f"{sharing[0].task}, seed {seeds}",
                "note": f"{sizes[0]:,} training and {sizes[1]:,} test examples, partition {part.fingerprint}",
                "clients": len(order),
                "counts": part.train[drawn].tolist(),
                "order": drawn.tolist(),
            }
        )
    return pictures


def _number(value: Any) -> float | None:
    """The value if it is a finite number, else none: JSON has no NaN."""
    return value if is_number(value) else None
