"""Operations that some devices have a faster way for.

An operation is a function of torch's own operations. That is its specification, and what runs everywhere. A faster
implementation registers itself with the operation and says which arguments it takes. Those for GPUs are in
`fedprior.kernels`; `engines/devices.py` has them registered when an engine is given a GPU.

>>> twice = Operation(lambda x: x + x)
>>> twice.register(lambda x: x << 1, lambda x: x > 0)
>>> twice(3), twice(-3)
(6, -6)
"""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor
from torch._C import _functorch

P = ParamSpec("P")
R = TypeVar("R")


class Operation(Generic[P, R]):
    """A function, and a faster one for some of its arguments."""

    def __init__(self, plain: Callable[P, R]) -> None:
        self.__qualname__ = plain.__qualname__
        update_wrapper(self, plain)
        self.plain = plain
        """What it computes, in torch's own operations."""
        self.fast: Callable[P, R] | None = None
        self.usable: Callable[..., bool] = lambda *_: False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.fast is not None and self.usable(*args, **kwargs):
            return self.fast(*args, **kwargs)
        return self.plain(*args, **kwargs)

    def register(self, fast: Callable[P, R], usable: Callable[..., bool]) -> None:
        """Call `fast` instead if `usable`, which gets the same arguments, returns true."""
        self.fast, self.usable = fast, usable

    def __reduce__(self) -> str:
        """Like a function, it is copied and pickled by its name."""
        return self.__qualname__


KNOWN: list[Operation[..., Any]] = []
"""Every operation that has been declared."""


def operation(plain: Callable[P, R]) -> Operation[P, R]:
    """Declares an operation by its specification."""
    declared = Operation(plain)
    KNOWN.append(declared)
    return declared


def batched(x: Tensor) -> bool:
    """Whether some enclosing `vmap` batches the tensor, so that there is one for each client."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False
