"""The part that runs on every device."""

from fedprior.flower import client_app
from fedprior_app.job import make_data, make_job

app = client_app(make_job, make_data)
