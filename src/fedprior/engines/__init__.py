"""Engines: many clients on one machine, every message encoded and counted; in a loop, or stacked."""
