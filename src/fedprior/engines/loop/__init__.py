"""One client after the other."""
