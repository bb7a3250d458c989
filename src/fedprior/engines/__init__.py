"""Engines: many clients on one machine, with every message encoded or counted, in a loop or stacked."""
