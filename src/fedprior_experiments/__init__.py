"""Experiments with fedprior that are not part of the library: the paper's, and the frontier."""
