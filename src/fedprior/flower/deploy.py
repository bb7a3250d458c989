"""`make deploy`: FedSparse on mnist-mini over TLS, on a server and three devices that are all this machine.

One device is killed on the way. What is left is a run's folder like any other.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from fedprior.errors import FedpriorError, RunError
from fedprior.flower.loopback import Loopback
from fedprior.report import summary_table
from fedprior.runs import unused_folder
from fedprior.simulate import RunFolder

APP = Path(__file__).parents[3] / "examples" / "flower-app"
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def deploy(
    out: Path, rounds: int = 4, kill_after: int = 2, settings: str = "local_steps=60", seconds: float = 600
) -> dict[str, Any]:
    """Train, with a device's power failure after a round; the summary."""
    if not (APP / "pyproject.toml").is_file():
        raise RunError(f"there is no app in {APP}: run this in a copy of the repository")
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="fedprior-deploy-"))

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.1f} s[/]  {text}")

    say(f"certificates, keys and logs in {folder}")
    with Loopback(folder) as federation:
        say("the server is up: TLS, three registered devices")
        for number in range(federation.nodes):
            federation.start_node(number)
        config = {
            "out": str(out.resolve()),
            "settings": f"clients=3; clients_per_round=3; rounds={rounds}; evaluate_every=1; {settings}",
            # Short, because the round in which the device dies waits for it in vain.
            "round-seconds": 45.0,
            "min-replies": 2,
        }
        run = federation.run(APP, config)
        say(f"run {run} is submitted")
        run_folder, done, alive = RunFolder(out), 0, True
        while not run_folder.summary.exists() or done < rounds:
            records = run_folder.records()
            for record in records[done:]:
                missing = [fault["client"] for fault in record.get("faults", ())]
                note = f", without {', '.join(f'client {client}' for client in missing)}" if missing else ""
                say(f"round {record['round']}: accuracy {100 * record['global_accuracy']:.1f}%{note}")
            done = len(records)
            if alive and done >= kill_after:
                federation.kill("node-2")
                alive = False
                say("SIGKILL to a device")
            _check(federation, run, began + seconds)
            time.sleep(0.5)
        while not (status := federation.status(run)).startswith("finished"):
            _check(federation, run, began + seconds)
        say(f"Flower says {status}")
    shutil.rmtree(folder)
    return json.loads(run_folder.summary.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _check(federation: Loopback, run: str, deadline: float) -> None:
    """Nobody waits for a run that has ended."""
    for name, process in federation.processes.items():
        if process.poll() is not None:
            raise RunError(f"{name} has ended; see {federation.folder / name}.log")
    log = (federation.folder / "superlink.log").read_text(encoding="utf-8", errors="replace")
    if "ServerApp raised an exception" in log or time.monotonic() > deadline:
        raise RunError(f"run {run} did not finish; see the logs in {federation.folder}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m fedprior.flower.deploy", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="the run's folder; runs/deploy if not given")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--settings", default="local_steps=60", help="key=value; key=value")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    out = given.out or unused_folder(Path("runs") / "deploy")
    try:
        summary = deploy(out, given.rounds, settings=given.settings)
    except KeyboardInterrupt:
        console.print("stopped; every process has been ended")
        os._exit(130)
    except FedpriorError as error:
        console.print(f"[bold red]error:[/] {error}", markup=True, soft_wrap=True)
        sys.exit(2)
    console.print(summary_table([summary]))
    console.print(f"{out / 'summary.json'}")


if __name__ == "__main__":
    main()
