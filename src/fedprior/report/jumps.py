"""When the training loss jumps, so that somebody can look, and to which checkpoint the run can go back.

A single round says little: its loss depends on its cohort. So it takes three in a row, far above the ten before them.
What recovers sooner needs no one.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fedprior.core.late import is_number

BEFORE, HIGH = 10, 3
"""How many rounds say what is usual, and how many must be far above it."""
TIMES, RANGES = 2.0, 2.0
"""Above this multiple of the median of what is usual, and by more than this multiple of its range."""
CHECKPOINTS = "checkpoints"
"""The folder, inside a run's, of the checkpoints that are kept."""


class Jump(NamedTuple):
    """The first round with a high loss, the last one that it takes to be sure, and what was usual before."""

    round: int
    sure: int
    losses: tuple[float, ...]
    usual: float
    private: bool = False
    """Whether the run is private, so that it does not go back."""

    @property
    def good(self) -> int:
        """The last round whose state is above suspicion: a round's loss tells of the state before it."""
        return self.round - 2


def jumps(records: Sequence[Mapping[str, Any]], *, suspected: bool = False) -> list[Jump]:
    """Every jump of the training loss; with `suspected`, one that only the last record or two show as well."""
    known = [(int(r["round"]), float(r["train_loss"])) for r in records if is_number(r.get("train_loss"))]
    losses = [loss for _, loss in known]
    end = len(losses) - (0 if suspected else HIGH - 1)
    high = [first for first in range(BEFORE, end) if _is_high(losses, first)]
    found = []
    for earlier, first in zip([-BEFORE - 1, *high], high, strict=False):
        if first - earlier > BEFORE:  # else it is the same jump, not over yet
            seen = known[first : first + HIGH]
            usual = median(losses[first - BEFORE : first])
            private = "epsilon" in records[-1]
            found.append(Jump(seen[0][0], seen[-1][0], tuple(loss for _, loss in seen), usual, private))
    return found


def _is_high(losses: Sequence[float], first: int) -> bool:
    """Whether the losses from this place on are far above those before it."""
    before, least = losses[first - BEFORE : first], min(losses[first : first + HIGH])
    if least <= (most := max(before)):
        return False
    usual = median(before)
    return least - usual > max((TIMES - 1) * abs(usual), RANGES * (most - min(before)))


def seen_now(records: Sequence[Mapping[str, Any]]) -> Jump | None:
    """The jump that the last record makes sure, if it does; it needs no more than the last few that have a loss."""
    known = (record for record in reversed(records) if is_number(record.get("train_loss")))
    found = jumps([*islice(known, 2 * BEFORE + HIGH)][::-1])
    return found[-1] if found and found[-1].sure == records[-1]["round"] else None


def kept_rounds(run: Path) -> list[int]:
    """The rounds whose checkpoints a run keeps."""
    return sorted(int(path.stem) for path in (run / CHECKPOINTS).glob("*.safetensors") if path.stem.isdecimal())


def line(jump: Jump, run: Path | None = None) -> str:
    """What happened, and the command that goes back before it, if a run's folder has a checkpoint from there."""
    *first, last = (f"{loss:.3g}" for loss in jump.losses)
    what = f"the loss jumped in round {jump.round}: {', '.join(first)} and {last}, where {jump.usual:.3g} was usual"
    if run is None or jump.private:
        return what
    good = [number for number in kept_rounds(run) if number <= jump.good]
    return f"{what}; " + (f"`fedprior rollback {run} --to {good[-1]}`" if good else "no checkpoint is kept from before")
