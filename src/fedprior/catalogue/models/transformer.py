"""A small decoder-only transformer for sequences of numbers, such as characters."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedprior.core.errors import SettingError


class Attention(nn.Module):
    """Causal attention with several heads: every position reads itself and what comes before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(read.transpose(1, 2).flatten(2))
        return out


class TransformerBlock(nn.Module):
    """Attention, then a layer of neurons; each reads the normalised stream and adds to it."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.gelu = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.fc2(self.gelu(self.fc1(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """From `[N, T]` numbers below `symbols`, T at most `context`, to `[N, T, symbols]` logits of the next one.

    The head shares its weights with the embedding of symbols.
    """

    def __init__(
        self, symbols: int, context: int = 64, width: int = 64, heads: int = 4, layers: int = 2, hidden: int = 0
    ) -> None:
        super().__init__()
        if min(symbols, context, width, heads, layers) < 1 or width % heads:
            raise SettingError(f"a transformer's width must be a multiple of its heads, got {width} and {heads}")
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Parameter(0.02 * nn.init.normal_(self.symbols.weight.new_empty(context, width)))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, hidden or 4 * width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        nn.init.normal_(self.symbols.weight, std=0.02)
        self.head.weight = self.symbols.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.symbols(x) + self.places[: x.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out
