"""A contestant's side of the conversation: wait for a turn, do a round, report how long it took."""

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch


class Turns(Iterator[int]):
    """`for number in turns:` does one round each time; a round is the time between two calls of `next`."""

    def __init__(self, pipe: Connection, total: int, device: str) -> None:
        self.pipe, self.total, self.device, self.number = pipe, total, device, 0
        self.began, self.cpu = 0.0, 0.0

    def __next__(self) -> int:
        if self.number:
            self._report()
        if self.number == self.total:
            raise StopIteration
        self.number += 1
        self.pipe.recv()
        self.began, self.cpu = time.perf_counter(), time.process_time()
        return self.number

    def _report(self) -> None:
        report: dict[str, Any] = {"cpu_seconds": time.process_time() - self.cpu}
        if self.device == "cuda":
            torch.cuda.synchronize()
            report["gpu_bytes"] = torch.cuda.max_memory_reserved()
        self.pipe.send({"seconds": time.perf_counter() - self.began, **report})
