"""The recurrent network that federated learning of text is usually measured with."""

from torch import Tensor, nn

from fedprior.core.errors import SettingError
from fedprior.core.options import nearest

CELLS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}


class CharRNN(nn.Module):
    """An embedding of 8 numbers, a two-layer LSTM or GRU, and a linear layer: `[N, T]` to `[N, T, symbols]` logits.

    With these defaults it has the layers with which McMahan et al. (2017) predict Shakespeare.
    """

    def __init__(self, symbols: int, width: int = 256, layers: int = 2, embedding: int = 8, cell: str = "lstm") -> None:
        super().__init__()
        if cell not in CELLS:
            raise nearest(cell, CELLS, "cell")
        if min(symbols, width, layers, embedding) < 1:
            raise SettingError("a recurrent network needs symbols, a width, layers and an embedding of at least 1")
        self.symbols = nn.Embedding(symbols, embedding)
        self.rnn = CELLS[cell](embedding, width, layers, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(self.symbols(x))[0])
        return out
