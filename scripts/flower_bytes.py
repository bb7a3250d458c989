"""What a deployment really sends: our count next to Flower's counter and the TCP bytes of the devices' connections.

    python scripts/flower_bytes.py [--rounds 3]

It starts a federation on loopback, as in `make deploy`, with a proxy between the devices and the server that counts the
bytes in each direction, including TLS and polling. Dense is fedavg; sparse is fedsparse with thresholds that close
units fast. It prints a Markdown table.
"""

import argparse
import json
import socket
import tempfile
import threading
import time
from pathlib import Path

from fedprior.flower.deploy import APP
from fedprior.flower.loopback import HOST, Loopback, end_on_signals
from fedprior.runs.folder import RunFolder

JOBS = {
    "dense (fedavg)": ("fedavg", ""),
    "sparse (fedsparse)": ("fedsparse", "server_threshold_optimiser=Adamax(lr=0.06)"),
}
IDLE = 20.0


class CountingProxy:
    """Forwards TCP connections and counts their bytes: `up` from the devices, `down` to them."""

    def __init__(self, target: int) -> None:
        self.target, self.up, self.down, self.lock = target, 0, 0, threading.Lock()
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            device, _ = self.listener.accept()
            server = socket.create_connection((HOST, self.target))
            threading.Thread(target=self._pass, args=(device, server, "up"), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, device, "down"), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
                with self.lock:
                    setattr(self, direction, getattr(self, direction) + len(data))
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()

    def counts(self) -> tuple[int, int]:
        """Bytes up and down so far."""
        with self.lock:
            return self.up, self.down


def measure(federation: Loopback, proxy: CountingProxy, folder: Path, name: str, rounds: int) -> dict[str, float]:
    """Run once and return its bytes by each of the three counts."""
    algorithm, settings = JOBS[name]
    before, began = proxy.counts(), time.monotonic()
    config = {
        "algorithm": algorithm,
        "out": str(folder),
        "settings": f"clients=3; clients_per_round=3; rounds={rounds}; local_steps=30; {settings}",
        "round-seconds": 300.0,
        "min-replies": 3,
    }
    run = federation.run(APP, config)
    federation.wait(run)
    up, down = (after - start for after, start in zip(proxy.counts(), before, strict=True))
    seconds = time.monotonic() - began
    records = RunFolder(folder).records()
    listed = federation.flwr("list", "loopback", "--run-id", run, "--format", "json")
    traffic = json.loads(listed[listed.index("{") :])["runs"][0]["network-traffic"]
    return {
        "messages": sum(len(record["clients"]) for record in records),
        "ours_up": sum(record["bytes_up"] for record in records),
        "ours_down": sum(record["bytes_down"] for record in records),
        "flower_up": traffic["inbound-bytes"],
        "flower_down": traffic["outbound-bytes"],
        "tcp_up": up,
        "tcp_down": down,
        "seconds": seconds,
    }


def main() -> None:
    """Measure and print."""
    end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as temporary, Loopback(Path(temporary) / "federation") as federation:
        proxy = CountingProxy(federation.port)
        federation.link_port = proxy.port
        for number in range(3):
            federation.start_node(number)
        time.sleep(15)
        before = proxy.counts()
        time.sleep(IDLE)
        up, down = ((after - start) / IDLE / 3 for after, start in zip(proxy.counts(), before, strict=True))
        print(f"An idle device: {up:,.0f} bytes per second up, {down:,.0f} down.\n")
        print("| run | direction | messages | ours | Flower's counter | TCP with TLS | TCP beyond ours, per message |")
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
        for name in JOBS:
            got = measure(federation, proxy, Path(temporary) / JOBS[name][0], name, rounds)
            for direction in ("up", "down"):
                ours, flower, tcp = (got[f"{count}_{direction}"] for count in ("ours", "flower", "tcp"))
                cells = f"{got['messages']} | {ours:,} | {flower:,} | {tcp:,} | {(tcp - ours) / got['messages']:,.0f}"
                print(f"| {name}, {got['seconds']:.0f} s | {direction} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
