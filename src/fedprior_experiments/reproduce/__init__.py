"""The paper's experiments from the data to the finished table and figures."""

from fedprior_experiments.reproduce.command import reproduce
from fedprior_experiments.reproduce.experiments import EXPERIMENTS, Cell, Cells, Experiment, Method, experiment
from fedprior_experiments.reproduce.planning import plan, read_seeds
from fedprior_experiments.reproduce.results import Results, read_results
from fedprior_experiments.reproduce.training import train

__all__ = [
    "EXPERIMENTS",
    "Cell",
    "Cells",
    "Experiment",
    "Method",
    "Results",
    "experiment",
    "plan",
    "read_results",
    "read_seeds",
    "reproduce",
    "train",
]
