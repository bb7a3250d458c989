"""Frameworks that do the same rounds, each in a process of its own."""
