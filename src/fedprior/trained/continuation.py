"""Continue a text with a network that predicts the next character: from a run, or from an export alone."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedprior.catalogue.data.text import Alphabet
from fedprior.core.errors import ModelError, SettingError
from fedprior.trained.compact.predict import describe, outputs, outputs_of
from fedprior.trained.export import trained


def continue_text(
    folder: Path | str,
    text: str,
    *,
    characters: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    personalise: int | None = None,
) -> str:
    """Return the text with this many further characters, from the network of a run or of an export.

    Each is drawn from the network's odds to the power of 1 / temperature; at temperature 0 it is the likeliest. With
    `personalise`, the network is a client's own.
    """
    if characters < 1 or not temperature >= 0 or temperature == float("inf"):
        raise SettingError(
            f"give at least 1 character and a temperature of at least 0, got {characters} and {temperature}"
        )
    if not text:
        raise SettingError("give at least one character to continue")
    predict, alphabet, context = _opened(Path(folder), personalise)
    numbers, draw = alphabet.encode(text).tolist(), torch.Generator().manual_seed(seed)
    for _ in range(characters):
        seen = numbers[-context:]
        # Always a whole window: what comes after a place does not change what the network says there.
        window = torch.tensor([seen + [0] * (context - len(seen))])
        odds = predict(window)[0, len(seen) - 1, : len(alphabet)].double()
        numbers.append(_chosen(odds, temperature, draw))
    return alphabet.decode(numbers)


def _opened(folder: Path, personalise: int | None) -> tuple[Callable[[Tensor], Tensor], Alphabet, int]:
    """The outputs of a network, its characters, and how many of them it reads."""
    if (folder / "model.json").is_file():
        if personalise is not None:
            raise SettingError(f"{folder} is an export, which is one network; --personalise needs a run")
        about = describe(folder)
        return partial(outputs, folder), _alphabet(about.get("alphabet"), folder), int(about["input_shape"][0])
    found = trained(folder, personalise=personalise, call="predict")
    characters = found.scale.characters if isinstance(found.scale, Alphabet) else None
    return partial(outputs_of, found.module), _alphabet(characters, folder), found.x.shape[1]  # type: ignore[union-attr]


def _alphabet(characters: str | None, folder: Path) -> Alphabet:
    if not characters:
        raise ModelError(f"{folder} was not trained on a text of characters, so there is nothing to continue")
    return Alphabet(characters)


def _chosen(odds: Tensor, temperature: float, draw: torch.Generator) -> int:
    if temperature == 0:
        return int(odds.argmax())
    return int(torch.multinomial((odds / temperature).softmax(0), 1, generator=draw))
