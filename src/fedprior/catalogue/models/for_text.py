"""Build a network by name that predicts the next symbol of a text."""

from collections.abc import Callable

from torch import nn

from fedprior.catalogue.models.recurrent import CharRNN
from fedprior.catalogue.models.transformer import Transformer
from fedprior.core.options import nearest


def for_text(name: str, symbols: int, context: int, width: int, layers: int, heads: int) -> nn.Module:
    """Build `transformer`, `gru` or `lstm`; only a transformer has a context and heads."""
    builders: dict[str, Callable[[], nn.Module]] = {
        "transformer": lambda: Transformer(symbols, context, width, heads, layers),
        "gru": lambda: CharRNN(symbols, width, layers, cell="gru"),
        "lstm": lambda: CharRNN(symbols, width, layers, cell="lstm"),
    }
    if name not in builders:
        raise nearest(name, builders, "model")
    return builders[name]()
