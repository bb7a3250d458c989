"""What tracing finds in a network: its gated layers, and the weights that read them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A gated layer: unit j owns row j of each of `parameters`."""

    name: str
    size: int
    parameters: tuple[str, ...]
    kind: str
    """`conv` or `linear`."""


@dataclass(frozen=True)
class Reader:
    """A weight whose columns read a wire: channel j feeds `repeat` columns, and is silent when all `sources` are."""

    parameter: str
    sources: tuple[str, ...]
    repeat: int


@dataclass(frozen=True)
class Structure:
    """What tracing found: the gated layers, and the weights that read them."""

    layers: tuple[Layer, ...]
    readers: tuple[Reader, ...]
    shapes: dict[str, tuple[int, ...]]
    output_layers: tuple[str, ...]
