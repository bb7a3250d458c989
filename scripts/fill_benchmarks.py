"""Write docs/benchmarks.md: every record under results/, with its date, its command and its main numbers.

python scripts/fill_benchmarks.py
"""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from fedprior.report import Table, find_runs

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
TOP = """# Benchmarks

Every record under [results](../results) on one page. `python scripts/fill_benchmarks.py` writes it from the records and
from [results/index.toml](../results/index.toml); a test fails when it is out of date. Do not edit it by hand.

- **Accuracies** are means over the evaluations in the last 5% of rounds, then over seeds, in percent.
- **GiB** are all messages of a run in both directions. **Sparsity** is the share of parameters that is gone at the end.
- **Date** is the day on which the records entered the repository.
- A **command** makes a set of records again; add `--data-dir` where your data are. For the exact command of every
  single run, open the page that `fedprior report results/NAME` writes: it ends with them.
"""
TIMES = """## Speed

Milliseconds are the median of the timed rounds. [performance.md](performance.md) says what each contestant does and
where the time goes; [benchmarks/README.md](../benchmarks/README.md) says why the comparison is fair.
"""


def number(values: list[float], digits: int = 1) -> str:
    """The mean of the known values."""
    known = [value for value in values if math.isfinite(value)]
    return f"{np.mean(known):.{digits}f}" if known else "–"


def of_runs(entry: dict[str, Any], results: Path) -> str:
    """One set of records: a row for each label or setting, over its seeds."""
    folder = results / entry["folder"]
    found = find_runs(folder)
    if found.broken or not found.runs:
        raise SystemExit(f"{folder} has no records, or broken ones: {[str(one.path) for one in found.broken]}")
    groups: dict[str, list[Any]] = {}
    for run in found.runs:
        groups.setdefault(run.path.parent.relative_to(folder).as_posix(), []).append(run)
    rows = []
    for name, runs in sorted(groups.items()):
        seeds = ", ".join(str(seed) for seed in sorted(run.seed for run in runs))
        gib = [run.final("gib") for run in runs]
        rows.append(
            [
                f"`{name}`",
                runs[0].algorithm,
                seeds,
                f"{runs[0].planned:,}",
                number([100 * run.late("global_accuracy") for run in runs]),
                number([100 * run.late("local_accuracy") for run in runs]),
                number(gib, 1 if np.mean(gib) >= 10 else 3),
                number([100 * run.final("sparsity") for run in runs]),
            ]
        )
    devices = sorted({str(run.summary["device"]) for run in found.runs})
    commands = "\n\n".join(command.strip() for command in entry["commands"])
    head = ["record", "algorithm", "seeds", "rounds", "global %", "local %", "GiB", "sparsity %"]
    about = f"{entry['date']}, {', '.join(devices)}, {len(found.runs)} runs: [the document]({entry['document']})."
    parts = [f"## {entry['title']}", f"`results/{entry['folder']}`, {about} {entry.get('note', '')}".rstrip()]
    return "\n\n".join([*parts, f"```sh\n{commands}\n```", Table(head, rows, words=3).markdown()])


def memory(mib: float) -> str:
    """Format a size; a dash if it was not measured."""
    return f"{mib:,.0f}" if mib else "–"


def of_timings(entry: dict[str, Any], results: Path) -> str:
    """One file of timed rounds."""
    found = json.loads((results / "performance" / entry["file"]).read_text(encoding="utf-8"))
    machine = found["machine"]
    where = f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}, {machine['threads']} threads"
    rows = [
        [
            task,
            name,
            f"{one['ms']:,.1f}",
            f"{one['ratio']:.2f}",
            *(memory(one[f"{kind}_mib"]) for kind in ("gpu", "host")),
        ]
        for task, contestants in found["tasks"].items()
        for name, one in contestants.items()
    ]
    head = ["task", "contestant", "ms per round", "× fedavg", "GPU MiB", "host MiB"]
    about = f"`results/performance/{entry['file']}`, {entry['date']}, {where}, {found['rounds']} timed rounds."
    return "\n\n".join([about, f"```sh\n{entry['command'].strip()}\n```", Table(head, rows, words=2).markdown()])


def of_table(entry: dict[str, Any], results: Path) -> str:
    """One file with a line for each of many short runs, unless it says how many, whose table is in another document."""
    count = entry.get("runs", len((results / entry["file"]).read_text(encoding="utf-8").splitlines()) - 1)
    about = f"`results/{entry['file']}`, {entry['date']}, {entry['machine']}, {count} runs: "
    return "\n\n".join(
        [
            f"## {entry['title']}",
            f"{about}[the document]({entry['document']}).",
            f"```sh\n{entry['command'].strip()}\n```",
        ]
    )


def page(results: Path) -> str:
    """The whole document."""
    index = tomllib.loads((results / "index.toml").read_text(encoding="utf-8"))
    runs = [of_runs(entry, results) for entry in index["runs"]]
    runs += [of_table(entry, results) for entry in index.get("tables", [])]
    return "\n".join([TOP, *runs, TIMES, *(of_timings(entry, results) for entry in index["timings"])])


if __name__ == "__main__":
    PAGE.write_text(page(ROOT / "results"), encoding="utf-8")
