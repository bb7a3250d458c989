"""`python -m fedprior`."""

from fedprior.cli import main

main()
