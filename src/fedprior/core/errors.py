"""Errors a user can mend. The command line prints them as one line and exits with 2."""


class FedpriorError(Exception):
    """Base of every error that is about the user's input, data or model."""


class SettingError(FedpriorError):
    """An unknown name, or an option of the wrong type or range."""


class DataError(FedpriorError):
    """A data set or partition that cannot be trained on."""


class ModelError(FedpriorError):
    """A model that the chosen algorithm cannot analyse or train."""


class WireError(FedpriorError):
    """A message that is truncated, damaged, foreign or not finite."""


class RunError(FedpriorError):
    """A run folder that exists, is missing, or holds something else."""


class DivergedError(RunError):
    """Training produced a number that is not finite."""


class FedpriorWarning(UserWarning):
    """What a user should know and may mend; training goes on. The command line prints it as one line."""
