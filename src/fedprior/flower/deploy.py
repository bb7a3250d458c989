"""`make deploy`: FedSparse on mnist-mini over TLS, on a server and three devices that are all this machine.

One device is killed along the way. The result is a run folder like any other.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fedprior.core.errors import FedpriorError, RunError
from fedprior.flower.job import named_job
from fedprior.flower.loopback import Loopback, end_on_signals
from fedprior.report import summary_table
from fedprior.runs.folder import RunFolder
from fedprior.runs.start import unused_folder

JOB = {"task": "mnist-mini", "algorithm": "fedsparse"}
SETTINGS = "local_steps=60"
APP = Path(__file__).parents[3] / "examples" / "flower-app"
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def deploy(
    out: Path,
    *,
    nodes: int = 3,
    rounds: int = 4,
    kill_after: int = 2,
    settings: str = SETTINGS,
    round_seconds: float = 45.0,
    seconds: float = 600.0,
) -> dict[str, Any]:
    """Train, simulate a power failure of the last device after a round, and return the run's summary.

    The round in which the device dies waits for it in vain, for `round_seconds`.
    """
    if not (APP / "pyproject.toml").is_file():
        raise RunError(f"there is no app in {APP}: run this in a copy of the repository")
    config = {
        **JOB,
        "out": str(out.resolve()),
        "settings": f"clients={nodes}; clients_per_round={nodes}; rounds={rounds}; evaluate_every=1; {settings}",
        "round-seconds": round_seconds,
        "start-seconds": seconds,
        "min-replies": nodes - 1,
    }
    # Check before anything starts: a mistake found here is one line; found later, it is buried in a log.
    RunFolder(out).check_unused()
    named_job(config)
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="fedprior-deploy-"))

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.1f} s[/]  {escape(text)}", soft_wrap=True)

    say(f"certificates, keys and logs in {folder}")
    with _cleared(folder), Loopback(folder, nodes) as federation:
        say(f"the server is up: TLS, {nodes} registered devices")
        for number in range(nodes):
            federation.start_node(number)
        run = federation.run(APP, config)
        say(f"run {run} is submitted")
        for record in _rounds(federation, RunFolder(out), run, rounds, began + seconds):
            missing = [f"client {fault['client']}" for fault in record.get("faults", ())]
            note = f", without {', '.join(missing)}" if missing else ""
            say(f"round {record['round']}: accuracy {100 * record['global_accuracy']:.1f}%{note}")
            if record["round"] == kill_after:
                federation.kill(f"node-{nodes - 1}")
                say(f"SIGKILL to the device of client {nodes - 1}")
        federation.wait(run, began + seconds)
        say("Flower says that the run is complete")
    return RunFolder(out).read_summary()


@contextlib.contextmanager
def _cleared(folder: Path) -> Iterator[None]:
    """Clear the folder. After an error keep the logs, which are useful, but never the keys."""
    failed = False
    try:
        yield
    except Exception:
        failed = True
        raise
    finally:
        for entry in folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif not failed or entry.suffix != ".log":
                entry.unlink()
        if not failed:
            folder.rmdir()


def _rounds(
    federation: Loopback, folder: RunFolder, run: str, rounds: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """Yield the records as they are written."""
    done = 0
    while done < rounds:
        for record in folder.records()[done:]:
            done += 1
            yield record
        _check(federation, run, deadline)
        time.sleep(0.5)


def _check(federation: Loopback, run: str, deadline: float) -> None:
    """Raise an error if a process or the run has ended or time is up, instead of waiting in vain."""
    for name, process in federation.processes.items():
        if process.poll() is not None:
            raise RunError(f"{name} has ended; see {federation.folder / name}.log")
    log = (federation.folder / "superlink.log").read_text(encoding="utf-8", errors="replace")
    if "ServerApp raised an exception" in log or time.monotonic() > deadline:
        raise RunError(f"run {run} did not finish; see the logs in {federation.folder}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m fedprior.flower.deploy", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="the run's folder; runs/deploy if not given")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--settings", default=SETTINGS, help="key=value; key=value")
    given = parser.parse_args()
    end_on_signals()
    out = given.out or unused_folder(Path("runs") / "deploy")
    try:
        summary = deploy(out, rounds=given.rounds, settings=given.settings)
    except KeyboardInterrupt:
        console.print("stopped; every process has been ended")
        sys.exit(130)
    except FedpriorError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    console.print(summary_table([summary]))
    console.print(f"{out / 'summary.json'}")


if __name__ == "__main__":
    main()
