"""Errors that a user can fix. The command line prints them as one line and exits with status 2."""


class FedpriorError(Exception):
    """The base class of every error about the user's input, data or model."""


class SettingError(FedpriorError):
    """An unknown name, or an option of the wrong type or range."""


class DataError(FedpriorError):
    """A data set or partition that cannot be trained on."""


class ModelError(FedpriorError):
    """A model that the chosen algorithm cannot analyse or train."""


class WireError(FedpriorError):
    """A message that is truncated, damaged, foreign or not finite."""


class RunError(FedpriorError):
    """A run folder that already exists, is missing, or holds something unexpected."""


class DivergedError(RunError):
    """Training has produced a number that is not finite."""


class FedpriorWarning(UserWarning):
    """Something the user should know and may want to fix. Training continues; the command line prints one line."""
