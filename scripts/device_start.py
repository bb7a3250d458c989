"""How long a device needs from a message to its first step, and what an import costs: both on this machine.

    python scripts/device_start.py

The first is read off a device's own log, as it appears: from Flower's "Receiving: train message" to our "computes".
The second alternates `import torch` and `import fedprior.flower` in fresh processes and compares their CPU seconds.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from fedprior.flower.deploy import APP
from fedprior.flower.loopback import Loopback

IMPORTS = ("import torch", "import fedprior.flower")


def import_ratio(repeats: int) -> float:
    """Return the CPU seconds of our import over those of torch's, medians of alternating processes."""
    spent: dict[str, list[float]] = {line: [] for line in IMPORTS}
    for _ in range(repeats):
        for line in IMPORTS:
            before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
            subprocess.run([sys.executable, "-c", line], check=True)
            spent[line].append(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before)
    torch, ours = (statistics.median(spent[line]) for line in IMPORTS)
    print(f"import torch {torch:.2f} s of CPU, import fedprior.flower {ours:.2f} s: {ours / torch:.2f} times")
    return ours / torch


def follow(path: Path, seen: list[tuple[float, str]], stop: threading.Event) -> None:
    """Note when each line of a growing file appears."""
    done = 0
    while not stop.is_set():
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        now = time.monotonic()
        seen += [(now, line) for line in lines[done:]]
        done = len(lines)
        time.sleep(0.01)


def waits(seen: list[tuple[float, str]]) -> list[float]:
    """Return the seconds from each message that trains to the moment when the client computes."""
    found, arrived = [], None
    for when, line in seen:
        if "Receiving: train message" in line:
            arrived = when
        elif " computes" in line and arrived is not None:
            found.append(when - arrived)
            arrived = None
    return found


def device_waits(rounds: int) -> list[float]:
    """Run a federation of one device and return its waits, by round."""
    with tempfile.TemporaryDirectory() as name, Loopback(Path(name), nodes=1) as federation:
        seen: list[tuple[float, str]] = []
        stop = threading.Event()
        follower = threading.Thread(target=follow, args=(Path(name) / "node-0.log", seen, stop))
        follower.start()
        try:
            federation.start_node(0)
            settings = f"clients=1; clients_per_round=1; rounds={rounds}; local_steps=10; evaluate_every={rounds}"
            config = {"out": str(Path(name) / "run"), "settings": settings}
            federation.wait(federation.run(APP, config), time.monotonic() + 900)
        finally:
            stop.set()
            follower.join()
        return waits(seen)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    import_ratio(given.repeats)
    found = " ".join(f"{wait:.2f}" for wait in device_waits(given.rounds))
    print("seconds from a message to its first step, by round:", found)


if __name__ == "__main__":
    main()
