"""The command line.

`app` joins the commands, which are in `train`, `experiments` and `results`; they share `options` and `terminal`.
"""

from fedprior.cli.app import main

__all__ = ["main"]
