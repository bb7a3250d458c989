"""The command line.

`app` joins the commands from `train`, `experiments` and `results`, which share `options` and `terminal`.
"""

from fedprior.cli.app import main

__all__ = ["main"]
