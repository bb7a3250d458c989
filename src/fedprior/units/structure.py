"""What tracing finds in a network: its gated layers, and the weights that read them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A gated layer: gate j switches row j of each of `parameters`, or with `axis` 1 column j of its only one."""

    name: str
    size: int
    parameters: tuple[str, ...]
    kind: str
    """`conv` or `linear`."""
    axis: int = 0
    """0: a gate is a unit of the layer's output; 1: of its input."""


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
    input_layers: tuple[str, ...]
    output_layers: tuple[str, ...]
    owned: dict[str, tuple[str, ...]]
    """What a unit of each source has a row of, whether or not it has a gate of its own. Sources with a norm are left
    out: a unit that nobody reads is still part of its neighbours' statistics."""
