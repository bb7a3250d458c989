"""Measure size and speed: parameters, bytes, multiply-adds, milliseconds."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedprior.core.trees import Params
from fedprior.core.workers import one_core


def parameters(module: nn.Module) -> int:
    """How many parameters a network has."""
    return sum(p.numel() for p in module.parameters())


def tied(module: nn.Module) -> dict[str, str]:
    """Maps each further name of a shared parameter or buffer to its first name."""
    first: dict[int, str] = {}
    values = module.state_dict(keep_vars=True)
    return {name: first[id(v)] for name, v in values.items() if first.setdefault(id(v), name) != name}


def stored(module: nn.Module) -> Params:
    """Every tensor that a file of the network must hold, listed once."""
    shared = tied(module)
    return {name: value for name, value in module.state_dict().items() if name not in shared}


def multiply_adds(module: nn.Module, example: Tensor) -> int:
    """Multiply-adds in convolutions and matrix products for one input."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(example.unsqueeze(0))
    return int(counter.get_total_flops()) // 2


REPEATS, PATIENCE = 100, 6.0


def fastest(calls: Sequence[Callable[[], object]]) -> list[float]:
    """CPU milliseconds for each call on one core: the fastest of 100 tries, or of as many as fit in six seconds.

    Time spent on other programs does not count, and the calls take turns, so that a busy machine reports nearly the
    same as an idle one. The calls must not use other threads.
    """
    best, begun = [float("inf")] * len(calls), time.perf_counter()
    with one_core(), torch.no_grad():
        for call in calls:
            call()
        for repeat in range(REPEATS):
            if repeat >= 10 and time.perf_counter() - begun > PATIENCE:
                break
            for i, call in enumerate(calls):
                start = time.thread_time()
                call()
                best[i] = min(best[i], 1000 * (time.thread_time() - start))
    return best
