"""What went wrong with devices while a run went on, from its records."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedprior.core.errors import counted
from fedprior.report.records import Run

NOTED = {"quarantined": "quarantined", "stragglers": "late", "clipped": "clipped"}
"""Fields of a record that list devices without saying what was wrong, and what is said of these devices."""


@dataclass(frozen=True)
class Fault:
    """One refused or missing reply."""

    round: int
    device: str
    what: str


@dataclass(frozen=True)
class Faults:
    """All faults of a run, in their order; and what else its records note of devices."""

    faults: tuple[Fault, ...] = ()
    noted: Mapping[str, Mapping[str, list[int]]] = field(default_factory=dict)
    """In which rounds a device was noted, by the record's field and the device."""

    def __bool__(self) -> bool:
        return bool(self.faults or self.noted)

    @property
    def by_device(self) -> dict[str, int]:
        """How many faults each device had, the most first; devices that are only noted come last, with none."""
        counts = dict(Counter(fault.device for fault in self.faults).most_common())
        return counts | {device: 0 for rounds in self.noted.values() for device in rounds if device not in counts}

    def rounds(self, name: str, device: str) -> list[int]:
        """The rounds in which a field lists a device."""
        return self.noted.get(name, {}).get(device, [])

    def last(self, device: str) -> tuple[int, str]:
        """The round of a device's last fault and what was wrong; without any, the last round in which it was noted."""
        wrong = [(fault.round, fault.what) for fault in self.faults if fault.device == device]
        return wrong[-1] if wrong else (max(r for name in self.noted for r in self.rounds(name, device)), "–")

    def line(self) -> str:
        """How many, the last one, and who else was noted."""
        parts = []
        if self.faults:
            last = self.faults[-1]
            parts.append(
                f"{counted(len(self.faults), 'fault')}, the last in round {last.round}: {last.device}: {last.what}"
            )
        for name, devices in self.noted.items():
            who = ", ".join(f"{device} (round {rounds[-1]})" for device, rounds in [*devices.items()][-3:])
            more = f" and {counted(len(devices) - 3, 'other')}" if len(devices) > 3 else ""
            parts.append(f"{NOTED[name]}: {who}{more}")
        return "; ".join(parts)


def faults_of(run: Run) -> Faults:
    """The faults in a run's records, and the devices that were quarantined, late or clipped."""
    found: list[Fault] = []
    noted: dict[str, dict[str, list[int]]] = {}
    for record in run.rounds:
        number = int(record["round"])
        found += [Fault(number, device, str(about.get("what", ""))) for device, about in _listed(record, "faults")]
        for name in NOTED:
            for device, _ in _listed(record, name):
                noted.setdefault(name, {}).setdefault(device, []).append(number)
    return Faults(tuple(found), {name: noted[name] for name in NOTED if name in noted})


def _listed(record: Mapping[str, Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The devices in a record's field, by client or, where a device has not said which client it is, by node."""
    listed = record.get(name)
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict):
            client = entry.get("client")
            yield f"node {entry.get('node')}" if client is None else f"client {client}", entry
        elif isinstance(entry, int):
            yield f"client {entry}", {}
