"""Errors that a user can fix. The command line prints them as one line and exits with status 2."""

from pathlib import Path


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


class FullDiskError(RunError):
    """There is no room on the disk for a file; what was kept before is whole."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cannot write {path}: {reason}. Free some space on the disk of {path.parent.resolve()}")
        self.path = path


class DivergedError(RunError):
    """Training has produced a number that is not finite."""


class FedpriorWarning(UserWarning):
    """Something the user should know and may want to fix. Training continues; the command line prints one line."""


def counted(number: int | str, noun: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {noun}" if str(number) == "1" else f"{number} {noun}s"


def described(value: object) -> str:
    """What was passed, for an error: `an int`, `a Tensor`, `the class Linear`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
