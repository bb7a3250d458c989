"""Frameworks that do the same rounds, each in a separate process."""
