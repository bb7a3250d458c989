"""A device that stays warm: Flower's SuperNode, and one process that has torch and fedprior loaded for its messages.

    python -m fedprior.flower.device --superlink server.example:443 --root-certificates ca.pem \\
        --auth-supernode-private-key node-0 --node-config 'partition-id=0'

It takes the arguments of `flower-supernode`, which starts a Python for every message, and that Python loads torch. Here
a message is answered by a fork of a process that has loaded torch once: as separate from other messages, but at once.
When one of the two processes ends, so does the other; a service manager can start both again.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import NoReturn

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime import run_clientapp as clientapp
from flwr.supernode.runtime.run_clientapp import run_clientapp

# What an app and a turn load; none of these starts a thread, so that a fork is safe.
from fedprior.flower import client, messages, node
from fedprior.flower.loopback import HOST, STOPS, free_ports, program

WARM = (client, messages, node)
OWN = ("--isolation", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile", "--superexec-auth-secret-file", "--host")
"""Arguments of `flower-supernode` that this program gives itself, or that would separate its two processes."""
LOOK_SECONDS = 0.1
"""How often the SuperNode is asked for a message: a local call of a millisecond or two."""
PARTS_SECONDS = 0.5
"""How often, at least, it is asked for parts of a message that it does not have yet."""
DIES_WITH_PARENT = 1
"""Linux: PR_SET_PDEATHSIG."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a SuperNode and answer its messages until one of the two ends."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not hasattr(os, "fork") or sys.platform == "darwin":
        sys.exit("this program needs Linux; elsewhere start flower-supernode with the same arguments")
    if "--help" in given or "-h" in given:
        print(__doc__)  # noqa: T201
        sys.exit(subprocess.call([program("flower-supernode"), "--help"]))
    for argument in given:
        if argument.split("=")[0] in OWN:
            sys.exit(f"{argument.split('=')[0]} cannot be chosen here: the SuperNode and its worker are one device")
    port, given = _port(given)
    for number in STOPS:
        signal.signal(number, _leave)
    command = [program("flower-supernode"), "--isolation", "process", "--host", HOST, "--port", str(port), *given]
    supernode = subprocess.Popen(command, preexec_fn=_die_with_parent)
    try:
        serve(f"{HOST}:{port}", lambda: supernode.poll() is None)
    finally:
        with contextlib.suppress(ProcessLookupError):
            supernode.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            supernode.wait(10)
        supernode.kill()
    sys.exit(supernode.wait() or 1)


def serve(address: str, alive: Callable[[], bool]) -> None:
    """Answer the messages that the SuperNode at this address has, each in a fork, while it is alive."""
    checks = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
    caller = RuntimeHttpClient.from_server_address(
        server_address=address, insecure=True, root_certificates=None, interceptors=checks
    )
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    while alive():
        try:
            token = caller.AcquireTask(request).token
        except httpx.TransportError:  # it starts, or has just ended
            token = ""
        if token:
            _answer(address, token)
        else:
            time.sleep(LOOK_SECONDS)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # forks that have answered
                pass


def _answer(address: str, token: str) -> None:
    """Let a fork of this process be Flower's `flwr-clientapp` for one message."""
    parent = os.getpid()
    if os.fork():
        return
    code = 1
    try:
        for number in STOPS:
            signal.signal(number, signal.SIG_DFL)
        _ask_often()
        run_clientapp(address, token, insecure=True, parent_pid=parent)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not the parent's way out


def _ask_often() -> None:
    """Ask for the parts of a message as often as for messages.

    A SuperNode offers a message before it has received its parts. Who asks for them too early asks again after a
    second, then after two, then four, up to ten: a process that starts slowly never is, a fork nearly always.
    """
    clientapp.pull_and_inflate_object_from_tree = partial(  # type: ignore[attr-defined]
        pull_and_inflate_object_from_tree,
        initial_backoff=LOOK_SECONDS,
        backoff_cap=PARTS_SECONDS,
        max_tries_per_object=None,
    )


def _port(given: list[str]) -> tuple[int, list[str]]:
    """Take the port for the two processes out of the arguments, or choose a free one."""
    for i, argument in enumerate(given):
        value = argument.partition("=")[2] if argument.startswith("--port=") else "".join(given[i + 1 : i + 2])
        if argument.split("=")[0] == "--port":
            if not value.isdigit():
                sys.exit(f"--port must be a number, got {value!r}")
            return int(value), given[:i] + given[i + (1 if "=" in argument else 2) :]
    return free_ports(1)[0], given


def _die_with_parent() -> None:
    """Linux ends the SuperNode when this process is killed, which no handler can do."""
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGTERM)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
