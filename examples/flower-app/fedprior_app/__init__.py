"""A fedprior job as a Flower app."""
