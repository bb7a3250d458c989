"""A disk that fills up: what is written counts, and the byte that has no room is an ENOSPC, as the system says it."""

import errno
import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


class Disk:
    """What has been written, and how much may be."""

    def __init__(self, room: float) -> None:
        self.room, self.written = room, 0


@contextmanager
def disk(room: float = float("inf")) -> Iterator[Disk]:
    """In this block, files take no more than so many bytes in all. An almost full disk takes a part of a block."""
    this, really = Disk(room if math.isinf(room) else math.floor(room)), Path.open

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            fits = min(len(data), this.room - this.written)
            if fits <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            this.written += int(fits)
            return super().write(bytes(data)[: int(fits)])

    def opened(path: Path, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if not {*mode} & {"w", "a"} or "b" not in mode:
            return really(path, mode, buffering, *args, **kwargs)
        file = File(path, mode.replace("b", ""))
        return file if buffering == 0 else io.BufferedWriter(file)

    with mock.patch.object(Path, "open", opened):
        yield this
