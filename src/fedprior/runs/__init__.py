"""Runs: turn a task and an algorithm into rounds, records, checkpoints and a folder."""

from fedprior.runs.drive import Result
from fedprior.runs.early import STOP
from fedprior.runs.folder import RunFolder
from fedprior.runs.start import resume, run

__all__ = ["STOP", "Result", "RunFolder", "resume", "run"]
