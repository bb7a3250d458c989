"""A whole federation on one machine: a SuperLink with TLS and authenticated SuperNodes, each in its own processes.

This does what the guide does by hand on several machines. However the block is left, it ends each process by its id.
"""

import contextlib
import json
import math
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from fedprior.core.errors import RunError
from fedprior.flower.certificates import make_certificates

HOST = "127.0.0.1"
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
START_SECONDS = 300
"""How long to wait for a server that never answers; a server that has ended is noticed at once."""


class Loopback:
    """Use it as `with Loopback(folder, nodes=3) as federation:`.

    With `simulation` there are no devices and no keys: Flower's engine simulates the devices in the server's process.
    """

    def __init__(self, folder: Path, nodes: int = 3, threads: int = 1, simulation: bool = False) -> None:
        self.folder, self.nodes, self.threads = folder.resolve(), nodes, threads
        self.simulation = simulation
        self.certificates = self.folder / "certificates"
        self.port, *self.node_ports = free_ports(nodes + 1)
        self.link_port = self.port
        """Where nodes find the SuperLink; a counting proxy may stand in between."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Loopback":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            make_certificates(self.certificates, [HOST, "localhost"], self.nodes)
            self._configure()
            self.start_superlink()
            # Register nodes before they start: the server refuses a node that is not registered.
            keys = [str(self.certificates / f"node-{number}.pub") for number in range(self.nodes)]
            keys = [] if self.simulation else keys
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda key: self.flwr("supernode", "register", key, "loopback"), keys))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _configure(self) -> None:
        """Write a connection for the `flwr` command. Flower requires absolute paths in it."""
        home = self.folder / "home-cli"
        home.mkdir()
        trust = f"root-certificates = {json.dumps(str(self.certificates / 'ca.pem'))}\n"
        home.joinpath("config.toml").write_text(
            f'[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\naddress = "{HOST}:{self.port}"\n'
            f"{'insecure = true' if self.simulation else trust}\n",
            encoding="utf-8",
        )

    def start_superlink(self) -> None:
        """Start the server and wait until it answers."""
        files = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "ca.pem"}
        secure = [f"--ssl-{option}={self.certificates / name}" for option, name in files.items()]
        kind = ["--simulation", "--insecure"] if self.simulation else ["--enable-supernode-auth", *secure]
        database = f"--database={self.folder / 'superlink.db'}"
        self._spawn(
            "superlink", [program("flower-superlink"), *kind, database, f"--host={HOST}", f"--port={self.port}"]
        )
        scheme = "http" if self.simulation else "https"
        context = ssl.create_default_context(cafile=str(self.certificates / "ca.pem"))
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.processes["superlink"].poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{scheme}://{HOST}:{self.port}/health", timeout=2, context=context):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RunError(f"the SuperLink did not start; see {self.folder / 'superlink.log'}")

    def start_node(self, number: int) -> None:
        """Start a device that acts as the client with this number: a warm one where there is `fork`."""
        warm = sys.platform == "linux"
        self._spawn(
            f"node-{number}",
            [
                *([sys.executable, "-m", "fedprior.flower.device"] if warm else [program("flower-supernode")]),
                f"--root-certificates={self.certificates / 'ca.pem'}",
                f"--superlink={HOST}:{self.link_port}",
                f"--auth-supernode-private-key={self.certificates / f'node-{number}'}",
                f"--port={self.node_ports[number]}",
                f"--node-config=partition-id={number}",
            ],
        )

    def kill(self, name: str) -> None:
        """Simulate a power failure: send SIGKILL to the process and everything it started."""
        process = self.processes.pop(name)
        _end(process, groups_of(process.pid), patience=0)

    def run(self, app: Path, config: Mapping[str, Any]) -> str:
        """Submit the app and return the id of its run."""
        pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        size = ["--federation-config", f"num-supernodes={self.nodes}"] if self.simulation else []
        out = self.flwr("run", str(app), "loopback", "--run-config", pairs, *size, "--format", "json")
        answer = json.loads(out[out.index("{") :])
        if "run-id" not in answer:  # a refusal has exit status 0 in this format
            raise RunError(f"flwr run failed: {answer.get('error-message', answer)}")
        return str(answer["run-id"])

    def status(self, run: str) -> str:
        """Return Flower's status of a run: `running`, `finished:completed`, `finished:failed`, …"""
        out = self.flwr("list", "loopback", "--run-id", run, "--format", "json")
        return str(json.loads(out[out.index("{") :])["runs"][0]["status"])

    def wait(self, run: str, deadline: float = math.inf) -> None:
        """Wait until a run is complete. Raise if it fails or is not complete by `deadline`, a `time.monotonic` time."""
        while not (status := self.status(run)).startswith("finished"):
            if time.monotonic() > deadline:
                break
            time.sleep(3)
        if status != "finished:completed":
            raise RunError(f"run {run} is {status}; see {self.folder / 'superlink.log'}")

    def flwr(self, *arguments: str) -> str:
        """Call the `flwr` command as a user would."""
        done = subprocess.run(
            [program("flwr"), *arguments], env=self._environment("cli"), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RunError(f"flwr {' '.join(arguments[:2])} failed: {done.stdout[-500:]}{done.stderr[-500:]}")
        return done.stdout

    def stop(self) -> None:
        """End every remaining process, first gently and then by force, nodes before their server."""
        with _patient():
            nodes = [name for name in self.processes if name != "superlink"]
            for names in (nodes, [name for name in self.processes if name not in nodes]):
                groups = {name: groups_of(self.processes[name].pid) for name in names}
                for name in names:
                    if self.processes[name].poll() is None:
                        self.processes[name].send_signal(signal.SIGTERM)
                for name in names:
                    _end(self.processes.pop(name), groups[name])

    def _spawn(self, name: str, command: list[str]) -> None:
        """Start a process in its own group, so that we can end it with its children and only we receive Ctrl-C."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self._environment(name),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, name: str) -> dict[str, str]:
        """Return an environment without telemetry, without installation and without a proxy for this machine itself."""
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.folder / f"home-{name}"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "NO_PROXY": f"{HOST},localhost",
            "no_proxy": f"{HOST},localhost",
            "OMP_NUM_THREADS": str(self.threads),
        }


def _end(process: subprocess.Popen[bytes], groups: set[int], patience: float = 10) -> None:
    """Wait for a process or kill it, and kill what it has started, which is in these groups."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    process.wait()


def groups_of(pid: int) -> set[int]:
    """Return the groups of our process and of all that it has started: a SuperLink's executor has its own group."""
    try:
        listed = subprocess.run(["ps", "-Ao", "pid=,ppid=,pgid="], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no ps: Flower's processes notice a lost parent
        return {pid}
    rows = [tuple(map(int, line.split())) for line in listed.splitlines()]
    family, size = {pid}, 0
    while len(family) > size:
        size = len(family)
        family |= {child for child, parent, _ in rows if parent in family}
    return {pid} | {group for child, _, group in rows if child in family}


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """Ignore a second Ctrl-C, so that no processes are left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_on_signals() -> None:
    """Make a program that uses `Loopback` leave its block also when it is told to end.

    The processes have sessions of their own and would outlive a closed terminal.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def program(name: str) -> str:
    """Find a program in this Python's environment, which need not be on the path."""
    found = Path(sys.executable).parent / name
    return str(found) if found.exists() else name


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody uses just now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
