"""What a running deployment says to a monitor: `/health`, and `/metrics` in Prometheus' text format.

Counters go on over a resume, because they are sums over the run's records. There is nothing else to see and nothing to
change; the address is the operator's choice, and none is opened without one.
"""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedprior.core.errors import RunError, SettingError
from fedprior.engines.server_state import Record

GAUGES = {
    "round": "the last round that ended",
    "train_loss": "the clients' loss in that round",
    "global_accuracy": "the server's model on the server's test examples, when last measured",
    "local_accuracy": "the clients' models on their own test examples, when last measured",
    "sparsity": "the share of the model's parameters that is gone, when last measured",
}
COUNTERS = {
    "bytes_up": "lengths of messages from clients",
    "bytes_down": "lengths of messages to clients",
    "faults": "replies that were refused or missing",
    "replies": "good replies",
}


def text(records: list[Record], rounds: int, labels: dict[str, str]) -> str:
    """Write the records of a run so far in Prometheus' format."""
    said = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    last: dict[str, float] = {"round": 0}
    for record in records:
        last |= {name: float(record[name]) for name in GAUGES if record.get(name) is not None}
    counts = {"bytes_up": "bytes_up", "bytes_down": "bytes_down"}
    sums = {name: sum(int(record[key]) for record in records) for name, key in counts.items()}
    sums["faults"] = sum(len(record.get("faults", ())) for record in records)
    sums["replies"] = sum(len(record["clients"]) for record in records)
    rows = [("rounds", "gauge", "the rounds that were asked for", float(rounds))]
    rows += [
        ("clients", "gauge", "good replies in the last round", float(len(records[-1]["clients"]) if records else 0))
    ]
    rows += [(name, "gauge", what, last[name]) for name, what in GAUGES.items() if name in last]
    rows += [(f"{name}_total", "counter", what, float(sums[name])) for name, what in COUNTERS.items()]
    lines = []
    for name, kind, what, value in rows:
        full = f"fedprior_{name}"
        lines += [f"# HELP {full} {what}", f"# TYPE {full} {kind}", f"{full}{{{said}}} {_number(value)}"]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def serving(address: str, records: list[Record], rounds: int, labels: dict[str, str]) -> Iterator[None]:
    """Answer at HOST:PORT while the block runs; nowhere if the address is empty."""
    if not address:
        yield
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise SettingError(f"metrics must be HOST:PORT, such as 127.0.0.1:9464, got {address!r}")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {"/health": "ok\n", "/metrics": text(list(records), rounds, labels)}
            body = pages.get(self.path, "see /metrics\n").encode()
            self.send_response(200 if self.path in pages else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a monitor calls every few seconds."""

    try:
        server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
    except (OSError, OverflowError) as error:
        raise RunError(f"cannot answer at metrics={address}: {getattr(error, 'strerror', None) or error}") from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(str(value)) or f"{value:.17g}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
