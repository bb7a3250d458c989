"""Write files completely or not at all, and name the file in the error if that fails, for example on a full disk."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from fedprior.core.errors import FullDiskError, RunError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""No room on the disk, or none left of the user's quota."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report any OSError in this block as a failure to write `path`: system errors often do not name the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in FULL:
            raise FullDiskError(path, reason) from error
        raise RunError(f"cannot write {path}: {reason}") from error


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace a file atomically: after a crash the old file or the new one is there, never half a file."""
    content = data.encode() if isinstance(data, str) else data
    with writing(path):
        if path.exists() and not path.is_file():  # /dev/stdout
            path.write_bytes(content)
            return
        target = path.resolve()  # a link stays a link
        temporary = target.with_name(target.name + ".part")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def append_line(path: Path, line: str) -> None:
    """Append a whole line, or nothing."""
    append_bytes(path, (line + "\n").encode())


def append_bytes(path: Path, data: bytes) -> None:
    """Append all of it, or nothing."""
    with writing(path), path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(data)
            while rest:  # an almost full disk may take only part of it
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(before)
            raise
