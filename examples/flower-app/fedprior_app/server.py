"""The part that runs on the server."""

from fedprior.flower import server_app
from fedprior_app.job import make_job

app = server_app(make_job)
