"""Algorithms: their names and presets, the factories that make them of a prior, and what each setting is."""

from fedprior.catalogue.algorithms.named import (
    ALGORITHMS,
    SIZES,
    Entry,
    algorithm,
    algorithm_settings,
    asked_algorithm,
    check_sized,
    entry,
    recorded_algorithm,
    run_settings,
    sized,
)

__all__ = [
    "ALGORITHMS",
    "SIZES",
    "Entry",
    "algorithm",
    "algorithm_settings",
    "asked_algorithm",
    "check_sized",
    "entry",
    "recorded_algorithm",
    "run_settings",
    "sized",
]
