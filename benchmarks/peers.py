"""Compare fedprior with other simulators on the same tasks, in turns: A B C A B C …

    python benchmarks/peers.py --device cpu
    python benchmarks/peers.py --device cuda --json results.json

Every contestant has its own process and waits there until it is told to do a round, so that only one works at a time.
One untimed round at the end measures memory: the resident memory of a contestant's processes, with shared pages counted
once.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from contestants.tasks import TASKS, Task
from contestants.turns import Turns

from fedprior.report.table import Table

PEERS = {
    "fedavg": ("contestants.ours", "fedavg", "fedprior"),
    "fedsparse": ("contestants.ours", "fedsparse", "fedprior"),
    "streamed": ("contestants.ours", "streamed", "fedprior"),
    "sweep": ("contestants.ours", "sweep", "fedprior"),
    "plain": ("contestants.plain", "play", "torch"),
    "pfl": ("contestants.pfl_research", "play", "pfl"),
    "flower": ("contestants.flower", "play", "flwr"),
}
"""For each name, the module and function that plays, and the package that it needs."""
PATIENCE = 300
"""The most seconds that one round may take, including the first, which loads and compiles."""
SWEPT = 9
"""The number of runs in the sweep."""


def play(peer: str, task: str, device: str, threads: int, total: int, pipe: Connection) -> None:
    """The body of a contestant's process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    module = importlib.import_module(PEERS[peer][0])
    getattr(module, PEERS[peer][1])(TASKS[task], device, threads, Turns(pipe, total, device))


@dataclass
class Contestant:
    """A process and its reports."""

    name: str
    process: Any
    pipe: Connection
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    host_bytes: int = 0
    failed: bool = False

    @classmethod
    def start(cls, name: str, task: Task, device: str, threads: int, total: int) -> "Contestant":
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=play, args=(name, task.name, device, threads, total, theirs))
        process.start()
        theirs.close()
        return cls(name, process, mine)

    def turn(self, *, timed: bool, watched: bool = False) -> None:
        """Do one round."""
        if self.failed:
            return
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(done,))
        if watched:
            self._look()
            watch.start()
        try:
            self.pipe.send("go")
            if self.pipe.poll(PATIENCE):
                self.report = self.pipe.recv()
            else:
                self._give_up(f"did not finish a round in {PATIENCE} s and is left out")
        except (EOFError, OSError):
            self._give_up("failed; see its output above")
        finally:
            done.set()
            if watched:
                watch.join()
                self._look()
        if timed and not self.failed:
            self.seconds.append(self.report["seconds"])
            self.cpu_seconds.append(self.report["cpu_seconds"])

    def _give_up(self, why: str) -> None:
        """Continue without this one: the others' table is worth having."""
        self.failed = True
        print(f"{self.name} {why}", file=sys.stderr, flush=True)
        self.process.terminate()

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(0.05):
            self._look()

    def _look(self) -> None:
        """Look before and after a round too: on a GPU, a round is shorter than the time between two looks."""
        self.host_bytes = max(self.host_bytes, resident(self.process.pid))

    def result(self) -> dict[str, Any]:
        if self.failed or not self.seconds:  # a failed one has fewer rounds to compare
            return {}
        milliseconds = [1e3 * second for second in self.seconds]
        return {
            "ms": statistics.median(milliseconds),
            "all_ms": milliseconds,
            # CPU time of all cores in the contestant's first process: the only fair measure on a shared machine.
            "cpu_ms": 1e3 * statistics.median(self.cpu_seconds),
            "host_mib": self.host_bytes / 2**20,
            "gpu_mib": self.report.get("gpu_bytes", 0) / 2**20,
        }


def resident(pid: int) -> int:
    """Bytes of a process and all its descendants; each process counts its share of a shared page."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident(int(child)) for child in (thread / "children").read_text().split())
    except OSError:  # it has ended in the meantime
        pass
    return total


def contest(task: Task, peers: list[str], device: str, threads: int, warmup: int, rounds: int) -> dict[str, Any]:
    """Run all peers on one task."""
    contestants = [Contestant.start(peer, task, device, threads, warmup + rounds + 1) for peer in peers]
    for contestant in contestants:  # one at a time, so that loading, compiling and capturing disturb no other
        began = time.time()
        for _ in range(warmup):
            contestant.turn(timed=False)
        print(f"{task.name}: {contestant.name} is warm after {time.time() - began:.0f} s", file=sys.stderr, flush=True)
    for _ in range(rounds):
        for contestant in contestants:
            contestant.turn(timed=True)
    for contestant in contestants:
        contestant.turn(timed=False, watched=True)
    for contestant in contestants:
        contestant.pipe.close()
        contestant.process.join(60)
        if contestant.process.is_alive():
            contestant.process.terminate()
    return {contestant.name: contestant.result() for contestant in contestants}


def table(task: str, results: dict[str, Any]) -> str:
    """A Markdown table: milliseconds per round, the ratio to our FedAvg round by round, and memory."""
    rows: list[list[str]] = []
    ours = results.get("fedavg", {})
    for name, result in results.items():
        if not result:
            rows.append([name, "failed", "", "", ""])
            continue
        ratio = ""
        if ours:
            # Compare round by round, so that other load on the machine cancels out.
            pairs = zip(result["all_ms"], ours["all_ms"], strict=True)
            result["ratio"] = statistics.median(mine / theirs for mine, theirs in pairs)
            ratio = f"{result['ratio']:.2f}"
        memory = [f"{result[f'{kind}_mib']:.0f}" for kind in ("host", "gpu")]
        rows.append([name, f"{result['ms']:.1f}", ratio, *memory])
    made = Table([task, "ms per round", "× fedavg", "host MiB", "GPU MiB"], rows).markdown()
    if results.get("sweep") and results.get("fedsparse"):
        alone = SWEPT * results["fedsparse"]["ms"]
        together = results["sweep"]["ms"]
        made += f"\n{SWEPT} runs: {alone:.1f} ms one after the other, {together:.1f} ms together, "
        made += f"{alone / together:.2f}×\n"
    return made.rstrip("\n")


def installed(peers: list[str]) -> list[str]:
    """The peers whose package is installed; print the names of the others."""
    here = [peer for peer in peers if importlib.util.find_spec(PEERS[peer][2])]
    for peer in peers:
        if peer not in here:
            print(f"{peer} is left out: {PEERS[peer][2]} is not installed (benchmarks/README.md)", file=sys.stderr)
    return here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--tasks",
        default="cifar10,cifar100,femnist,pfl-cifar10",
        help=f"separated by commas: {', '.join(TASKS)}",
    )
    parser.add_argument(
        "--peers", help=f"separated by commas: {', '.join(PEERS)}; usually all that make sense on the device"
    )
    parser.add_argument("--rounds", type=int, help="timed rounds for each; by default 10 on a CPU, 30 on a GPU")
    parser.add_argument("--warmup", type=int, help="rounds before that; by default 1 on a CPU, 20 on a GPU")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="cores that a contestant may use")
    parser.add_argument("--json", type=Path, help="where to put all numbers")
    chosen = parser.parse_args()
    gpu = chosen.device == "cuda"
    everyone = [peer for peer in PEERS if peer not in (("flower",) if gpu else ("streamed", "sweep"))]
    peers = installed(chosen.peers.split(",") if chosen.peers else everyone)
    rounds, warmup = chosen.rounds or (30 if gpu else 10), chosen.warmup or (20 if gpu else 1)
    machine = {
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "threads": chosen.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    results: dict[str, Any] = {"machine": machine, "rounds": rounds, "tasks": {}}
    for name in chosen.tasks.split(","):
        began = time.time()
        found = contest(TASKS[name], peers, chosen.device, chosen.threads, warmup, rounds)
        print(f"\n{table(name, found)}\n\n{time.time() - began:.0f} s", flush=True)
        results["tasks"][name] = found
        if chosen.json:
            chosen.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
