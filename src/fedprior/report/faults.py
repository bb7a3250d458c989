"""What went wrong with devices while a run went on, from its records."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedprior.core.errors import counted
from fedprior.report.records import Run


@dataclass(frozen=True)
class Fault:
    """One refused or missing reply."""

    round: int
    device: str
    what: str


@dataclass(frozen=True)
class Faults:
    """All faults of a run, in their order."""

    faults: tuple[Fault, ...]

    def __bool__(self) -> bool:
        return bool(self.faults)

    @property
    def by_device(self) -> dict[str, int]:
        """How many faults each device had, the most first."""
        return dict(Counter(fault.device for fault in self.faults).most_common())

    def line(self) -> str:
        """How many, and the last one."""
        last = self.faults[-1]
        return f"{counted(len(self.faults), 'fault')}, the last in round {last.round}: {last.device}: {last.what}"


def faults_of(run: Run) -> Faults:
    """The faults in a run's records; a simulated run has none."""
    found = []
    for record in run.rounds:
        listed = record.get("faults")
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, dict):
                found.append(Fault(int(record["round"]), _device(entry), str(entry.get("what", ""))))
    return Faults(tuple(found))


def _device(entry: Mapping[str, Any]) -> str:
    """The client, or the node of a device that has not said which client it is."""
    client = entry.get("client")
    return f"node {entry.get('node')}" if client is None else f"client {client}"
