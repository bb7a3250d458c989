"""The same algorithm on real machines: Flower carries messages in our wire format.

Only this package imports flwr (`pip install 'fedprior[flower]'`). See docs/deployment.md. A device imports only its own
half: what the server needs is loaded when it is asked for, and Flower when an app is built.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("flwr") is None:
    raise ImportError("fedprior.flower needs Flower: pip install 'fedprior[flower]'")

from fedprior.flower.client import client_app, client_number
from fedprior.flower.job import Job, Limits, named_job, own_job

if TYPE_CHECKING:
    from fedprior.flower.apps import server_app
    from fedprior.flower.server import Server
    from fedprior.flower.strategy import HardEM

__all__ = [
    "HardEM",
    "Job",
    "Limits",
    "Server",
    "client_app",
    "client_number",
    "named_job",
    "own_job",
    "server_app",
]

_HOMES = {"HardEM": "strategy", "Server": "server", "server_app": "apps"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
