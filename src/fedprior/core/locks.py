"""One writer a run's folder: a lock that is the kernel's and goes with its process, however that ends.

Two writers would mix their records. Readers (`watch`, `report`, `export`) ask for no lock.
"""

import contextlib
import errno
import os
import socket
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedprior.core.errors import FedpriorWarning, RunError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # mypy takes the name for a module only

NAME = ".lock"
"""The file that is locked. Not the config, which may be replaced by another file of that name."""
UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}
"""What file systems without locks say."""


@contextlib.contextmanager
def alone_in(folders: Iterable[Path]) -> Iterator[None]:
    """Be the only one that writes to these folders, which are made, or say in one line who is."""
    with contextlib.ExitStack() as held:
        for folder in folders:
            held.enter_context(_alone_in(folder))
        yield


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _acquire(folder)
    except OSError as error:
        _leave(made)
        raise RunError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        yield
    finally:
        # Removed while it is still ours: a finished run has no trace of it. A folder that nothing came of goes too.
        with contextlib.suppress(OSError):
            (folder / NAME).unlink()
        os.close(file)
        _leave(made)


def _leave(made: list[Path]) -> None:
    """Remove folders, the innermost first, that nothing is in."""
    with contextlib.suppress(OSError):
        for path in made:
            path.rmdir()


def _acquire(folder: Path) -> int:
    """The lock, as an open file that children do not inherit."""
    path = folder / NAME
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(file, folder)
            # Its last holder may have removed the file between our opening and locking it: then it locks nothing.
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                _sign(file, path)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _sign(file: int, path: Path) -> None:
    """Say whose it is; a full disk keeps no empty file."""
    try:
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError:
        path.unlink()
        raise


def _lock(file: int, folder: Path) -> None:
    try:
        if fcntl is None:
            raise OSError(errno.ENOTSUP, "no flock")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        who = os.read(file, 200).decode(errors="replace") or "another process"  # which has just begun
        raise RunError(f"{folder} is being trained by {who}; wait for its end, or end it") from error
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        text = f"there are no locks where {folder} is: see that no other process trains it"
        warnings.warn(text, FedpriorWarning, stacklevel=2)
