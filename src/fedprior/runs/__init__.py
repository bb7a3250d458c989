"""Runs: turn a task and an algorithm into rounds, records, checkpoints and a folder."""
