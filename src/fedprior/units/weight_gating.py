"""One gate per weight."""

from torch import Tensor

from fedprior.core.errors import ModelError
from fedprior.core.trees import Gates, Params
from fedprior.units.gating import Gating


class WeightGating(Gating):
    """One gate per weight, for weights with two or more dimensions. Works for any model; nothing dies downstream.

    Biases and norms stay dense: they are few, and a norm's bias starts at zero, below any threshold.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], *, floor: int = 1) -> None:
        super().__init__(floor)
        self.shapes = shapes
        self.gate_shapes = {name: shape for name, shape in shapes.items() if len(shape) > 1}
        if not self.gate_shapes:
            raise ModelError("the model has no weights with two or more dimensions, so there is nothing to gate")

    def joint_norms(self, params: Params) -> Tensor:
        return self.join(params).abs()

    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(self.gate_shapes, 1)

    def rows(self, gates: Gates) -> Params:
        return dict(gates)

    def apply(self, params: Params, gates: Gates) -> Params:
        return {name: value * gates[name] if name in gates else value for name, value in params.items()}

    def mask(self, gates: Gates, own: Gates | None = None) -> Params:
        return dict(gates) if own is None else {name: gate * own[name] for name, gate in gates.items()}
