"""What tracing finds in a network: its gated layers, and the weights that read them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A gated layer: gate j switches row j of each of its `parameters`; if `axis` is 1, column j of its only one.

    With blocks, it switches the j-th block of rows instead, in each run of as many blocks as there are gates.
    """

    name: str
    size: int
    parameters: tuple[str, ...]
    kind: str
    """`conv` or `linear`."""
    axis: int = 0
    """0 if gates are on the layer's outputs, 1 if they are on its inputs."""
    columns: tuple[str, ...] = ()
    """Parameters of which gate j switches column j as well: the second factor of an adapter."""
    blocks: tuple[int, ...] = ()
    """How many consecutive rows of each parameter a gate switches: those of an attention head. Empty for one row each.

    A fused projection has several runs of blocks: those of the queries, of the keys, and of the values."""

    @property
    def owned(self) -> tuple[str, ...]:
        """Every parameter of which a unit has a part."""
        return (*self.parameters, *self.columns)


@dataclass(frozen=True)
class Reader:
    """A weight whose columns read an edge: channel j feeds `repeat` columns, and is silent when all `sources` are."""

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
    """The parameters in which a unit of each source has a row, with or without a gate of its own. Sources with a norm
    are left out: even a unit that nothing reads is part of its neighbours' statistics."""
    dense: str = ""
    """Text that says which layers have no gates although they have units."""
