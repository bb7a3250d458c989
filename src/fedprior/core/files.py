"""Files that are whole or not there, and a line that names the one that could not be written, as on a full disk."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fedprior.core.errors import RunError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong in here is that this cannot be written: the system's own errors often name no file."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace a file at once: after a crash there is the old one or the new one, never half of one."""
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
    """A whole line more, or none."""
    with writing(path), path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            rest = memoryview((line + "\n").encode())
            while rest:  # a disk that is almost full takes a part
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(before)
            raise
