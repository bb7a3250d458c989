"""A warm device: its two processes live and die together, and a message is answered in a fork that loads nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

from flwr.app import ConfigRecord, RecordDict
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError

from fedprior.flower import device

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a device forks")
ASKED = "/v1/runtime/acquire-task"


def alive(pid):
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def child_of(pid):
    listed = subprocess.run(["ps", "-Ao", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    (child,) = (int(one) for one, parent in (line.split() for line in listed.splitlines()) if int(parent) == pid)
    return child


@contextlib.contextmanager
def supernode(tokens):
    """A stand-in for a SuperNode's interface that has these tasks, one after the other."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reply = AcquireTaskResponse()
            if self.path == ASKED and tokens:
                reply.token = tokens.pop(0)
                reply.task.task_id = 1
            data = reply.SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_every_message_is_answered_in_a_fork_of_its_own(tmp_path, monkeypatch):
    """The forks have what this process has loaded: modules are neither found nor read again."""
    answered = tmp_path / "answered"

    def answer(address, token, insecure, parent_pid):
        with answered.open("a") as file:
            file.write(f"{token} {os.getpid() != parent_pid} {parent_pid} {'torch' in sys.modules}\n")
        sys.exit(1)  # Flower leaves in this way; it must not be the parent's

    monkeypatch.setattr(device, "run_clientapp", answer)
    monkeypatch.setattr(device, "LOOK_SECONDS", 0.001)
    left = ["one", "two"]
    with supernode(left) as address:
        device.serve(address, lambda: not answered.exists() or len(answered.read_text().splitlines()) < 2)
    lines = sorted(answered.read_text().splitlines())
    assert lines == [f"{token} True {os.getpid()} True" for token in ("one", "two")]


def test_a_fork_that_is_earlier_than_its_message_does_not_wait_a_second_for_it(monkeypatch):
    """Flower's own waits, as they are asked for: nobody sleeps here."""
    waits, missing = [], dict.fromkeys(range(6))
    sent = RecordDict({"x": ConfigRecord({"y": 1})})

    class Event(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            return True

    def pull(name):
        if missing:
            missing.popitem()
            raise ObjectUnavailableError(name)
        return get_all_nested_objects(sent)[name].deflate()

    module = inflatable_utils
    monkeypatch.setattr(device.clientapp, "pull_and_inflate_object_from_tree", None)
    device._ask_often()
    fake = SimpleNamespace(Event=Event, Lock=threading.Lock)
    monkeypatch.setattr(module, "threading", fake)
    found = device.clientapp.pull_and_inflate_object_from_tree(
        get_object_tree(sent), pull, lambda name: None, return_type=RecordDict, max_concurrent_pulls=1
    )
    assert found == sent
    assert len(waits) == 6
    assert waits[0] <= 0.12 < 0.4 <= waits[-1] <= 0.6


@pytest.mark.parametrize("killed", ["device", "supernode"])
def test_killed_together(killed, tmp_path):
    """No server is needed: the SuperNode tries to reach one for ever."""
    command = [sys.executable, "-m", "fedprior.flower.device", "--insecure", "--superlink=127.0.0.1:1"]
    environment = {
        **os.environ,
        "FLWR_HOME": str(tmp_path),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        while b"Starting Flower SuperNode" not in process.stdout.readline():
            assert process.poll() is None
        child = child_of(process.pid)
        os.kill({"device": process.pid, "supernode": child}[killed], signal.SIGKILL)
        process.stdout.close()
        assert process.wait() != 0
        while alive(child):
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--isolation", "process"], "--isolation cannot be chosen here"),
        (["--ssl-certfile=x"], "--ssl-certfile cannot be chosen here"),
        (["--port", "many"], "--port must be a number, got 'many'"),
    ],
)
def test_arguments_that_would_separate_the_two_are_refused(arguments, words):
    with pytest.raises(SystemExit, match=words):
        device.main(arguments)


def test_a_given_port_is_used_and_all_else_is_handed_on():
    assert device._port(["--port", "9100", "--insecure"]) == (9100, ["--insecure"])
    assert device._port(["--insecure", "--port=9100", "--x", "y"]) == (9100, ["--insecure", "--x", "y"])
    chosen, rest = device._port(["--insecure"])
    assert chosen > 0
    assert rest == ["--insecure"]
