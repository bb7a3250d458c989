"""Let only one process write to a run's folder. The kernel releases the lock when the process ends, however it ends.

Two writers would mix their records. Readers (`watch`, `report`, `export`) need no lock; `watch` looks who holds it.
"""

import contextlib
import errno
import os
import socket
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedprior.core.errors import FedpriorWarning, RunError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # mypy takes the name for a module only

NAME = ".lock"
"""The file that is locked. It is not the config, because that file may be replaced by a new one."""
UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}
"""The errors that file systems without locks return."""
ATTEMPTS, PAUSE = 5, 0.02
"""How often to try, and seconds between. `held` has the lock for less."""


def held(folder: Path) -> bool | None:
    """Whether a process is the writer of a run's folder; none where this cannot be told."""
    if fcntl is None:
        return None
    try:
        file = os.open(folder / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False
    finally:
        os.close(file)


@contextlib.contextmanager
def alone_in(folders: Iterable[Path]) -> Iterator[None]:
    """Create these folders and be their only writer, or raise an error that names the current one."""
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
        # Remove the file while we still hold it, so that a finished run leaves no trace. Empty new folders go too.
        with contextlib.suppress(OSError):
            (folder / NAME).unlink()
        os.close(file)
        _leave(made)


def _leave(made: list[Path]) -> None:
    """Remove empty folders, the innermost first."""
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
            # The last holder may have removed the file after we opened it; then our lock would protect nothing.
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                _sign(file, path)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _sign(file: int, path: Path) -> None:
    """Write down who holds the lock; if the disk is full, leave no empty file."""
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
        for attempt in range(ATTEMPTS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(PAUSE)
    except BlockingIOError as error:
        who = os.read(file, 200).decode(errors="replace") or "another process"  # it has not signed yet
        raise RunError(f"{folder} is being trained by {who}; wait for it to finish, or stop it") from error
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        text = f"the file system of {folder} has no locks: make sure that no other process trains it"
        warnings.warn(text, FedpriorWarning, stacklevel=2)
