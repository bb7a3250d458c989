"""The same algorithm on real machines: Flower carries messages in our wire format.

Only this package imports flwr (`pip install 'fedprior[flower]'`). See docs/deployment.md.
"""

try:
    import flwr as flwr
except ImportError as error:
    raise ImportError("fedprior.flower needs Flower: pip install 'fedprior[flower]'") from error

from fedprior.flower.apps import client_app, server_app
from fedprior.flower.job import Job, Limits, named_job, own_job
from fedprior.flower.server import Server
from fedprior.flower.strategy import HardEM

__all__ = ["HardEM", "Job", "Limits", "Server", "client_app", "named_job", "own_job", "server_app"]
