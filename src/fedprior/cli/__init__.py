"""The command line.

`app` joins the commands from `runs`, `experiments` and `results`, which share `arguments` and `terminal`.
"""

from fedprior.cli.app import main

__all__ = ["main"]
