"""Keep earlier checkpoints of a run, and go back to one.

A kept checkpoint is a second name of the file that was `checkpoint.safetensors` once, so it costs no second write. With
it goes the best model up to then, if the run has one.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedprior.core import keys, storage
from fedprior.core.errors import RunError, SettingError, described
from fedprior.core.files import FULL, write_atomically, writing
from fedprior.core.locks import alone_in
from fedprior.core.settings import Settings
from fedprior.engines.server_state import Record
from fedprior.report.jumps import jumps, kept_rounds
from fedprior.runs.checkpoint import DEPLOYED, FORMAT
from fedprior.runs.folder import RunFolder, checksum


def forced(settings: Settings, number: int) -> bool:
    """Whether a round's checkpoint is kept for good, so that there must be one."""
    return settings.keep_every is not None and number % settings.keep_every == 0


def keep(folder: RunFolder, settings: Settings, number: int, records: list[Record]) -> None:
    """Keep the checkpoint of this round, which is the run's, and remove those that are no longer wanted.

    Wanted are the last ones, those that are kept for good, and the last one before each jump of the loss: who reads of
    it a day later can still go back. Those of later rounds are from before the run went back.
    """
    if folder.best.exists():  # before the checkpoint, so that a kept one has its best model for certain
        _name(folder.best, _place(folder, number, "best."))
    _name(folder.checkpoint, _place(folder, number))
    there = [kept for kept in kept_rounds(folder.path) if kept <= number]
    wanted = {*there[-settings.keep_checkpoints :], *(kept for kept in there if forced(settings, kept))}
    for jump in jumps(records, suspected=True):
        wanted |= {*[kept for kept in there if kept <= jump.good][-1:]}
    _remove_all_but(folder, wanted)


def go_on(folder: RunFolder, settings: Settings, number: int, records: list[Record]) -> None:
    """Go on from the run's checkpoint, of this round, or from its start: the best model is again the one up to then.

    A crash may have come in a later round, which left its own, or before the checkpoint was kept.
    """
    if not folder.checkpoint.exists():
        folder.best.unlink(missing_ok=True)
        return
    if _place(folder, number).exists():
        _put_back_best(folder, number)
    keep(folder, settings, number, records)


def rollback(path: Path | str, to: int) -> None:
    """Put a run back to a round whose checkpoint it keeps; `fedprior.resume`, or Flower's, then goes on from there.

    Records after that round are removed, and so are later checkpoints and what the run left at its end.
    """
    if not isinstance(to, int) or isinstance(to, bool):
        raise SettingError(f"a run goes back to the number of a round, not to {described(to)}")
    folder = RunFolder(Path(path))
    folder.read_config()
    with alone_in([folder.path]):
        expected, records = _check(folder, to)
        # Killed at any moment, the run can be resumed, or rolled back again: the checkpoint is replaced before the
        # records are cut, because records that are too many are cut by `resume`, too. Until then, later ones are kept.
        folder.diverged.unlink(missing_ok=True)
        if len(records) > to:
            folder.reopen()
            folder.model.unlink(missing_ok=True)
        _name(_place(folder, to), folder.checkpoint)
        _put_back_best(folder, to)
        _remove_all_but(folder, {kept for kept in kept_rounds(folder.path) if kept <= to})
        folder.truncate(to, expected)
        folder.truncate_times(to)


def _check(folder: RunFolder, to: int) -> tuple[str, list[Record]]:
    """The records, and the checksum of those up to a round whose checkpoint is kept, whole and this run's."""
    run, place, there = folder.read_config()["run"], _place(folder, to), kept_rounds(folder.path)
    if to not in there:
        those = f"it keeps {', '.join(map(str, there))}" if there else "it keeps none"
        raise RunError(f"{folder.path} keeps no checkpoint of round {to}: {those}")
    name = folder.deployed
    # Going on again would spend the budget twice, in a simulation with the same noise on other uploads.
    if "epsilon" in run or "noise_multiplier" in run:
        raise RunError(f"{folder.path} is private: going back would not take back what its later rounds have told")
    saved = storage.load(place, DEPLOYED if name else FORMAT, name or None)
    records = folder.records()
    if not (name or _is_of(run, saved.run)) or len(records) < to or checksum(records[:to]) != saved.records:
        raise RunError(f"{place} does not belong to the records in {folder.rounds}")
    return saved.records, records


def _is_of(run: Mapping[str, Any], identity: str) -> bool:
    """Whether what identifies a simulation's checkpoint names this run's algorithm and seed; `resume` sees the rest."""
    try:
        about = json.loads(identity)
        return (about["algorithm"], about["key"]) == (run["algorithm"], int(keys.key(run["seed"])))
    except (ValueError, TypeError, KeyError):
        return False


def _put_back_best(folder: RunFolder, number: int) -> None:
    """Let the best model be the one that was kept with a checkpoint, if there was any yet."""
    if (best := _place(folder, number, "best.")).exists():
        _name(best, folder.best)
    else:
        folder.best.unlink(missing_ok=True)


def _place(folder: RunFolder, number: int, kind: str = "") -> Path:
    return folder.checkpoints / f"{number}.{kind}safetensors"


def _name(source: Path, target: Path) -> None:
    """Give a file a second name, in the place of whatever had it; a copy where the file system has no links."""
    source, target = source.resolve(), target.resolve()
    with writing(target):
        target.parent.mkdir(exist_ok=True)
        if target.exists() and target.samefile(source):
            return
        part = target.with_name(target.name + ".part")
        part.unlink(missing_ok=True)
        try:
            part.hardlink_to(source)
        except OSError as error:
            if error.errno in FULL:
                raise
            write_atomically(target, source.read_bytes())
            return
        part.replace(target)


def _remove_all_but(folder: RunFolder, wanted: set[int]) -> None:
    """Remove kept checkpoints of other rounds, and halves of them; a checkpoint before its best model."""
    for path in sorted(folder.checkpoints.iterdir(), key=lambda path: len(path.name)):
        number = path.name.partition(".")[0]
        if path.suffix == ".part" or (number.isdecimal() and int(number) not in wanted):
            path.unlink()
