"""A run that goes back to a kept checkpoint and on from there leaves what a run leaves that never went back."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors

import fedprior
from fedprior import RunError
from fedprior.core import locks
from fedprior.core.errors import FedpriorWarning, FullDiskError
from fedprior.core.storage import to_bytes
from fedprior.engines.server_state import learned
from fedprior.report.client_table import read_clients
from fedprior.report.jumps import jumps, kept_rounds, line, seen_now
from fedprior.report.watch import look, view
from fedprior.runs import sweeps
from fedprior.runs.asked import assemble
from fedprior.runs.drive import drive
from fedprior.runs.early import STOP
from fedprior.runs.start import open_session, start_session

FILES = ("config.toml", "rounds.jsonl", "model.safetensors", "clients.bin", "best.safetensors")
KEEPING = {"rounds": 9, "evaluate_every": 2, "checkpoint_every": 1, "keep_checkpoints": 2, "keep_every": 4}


class Broken(BaseException):
    """Stands for the end of the process: no `except Exception` of the library may see it."""


def contents(folder):
    """What must be the same at the end, summary included."""
    summary = json.loads((folder / "summary.json").read_text()) | {"seconds": 0}
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()} | {"summary": summary}


def round_of(path):
    with safetensors.safe_open(str(path), framework="pt") as file:
        return int(file.metadata()["round"])


def stop_after(rounds):
    def progress(record):
        if record["round"] == rounds:
            raise Broken

    return progress


@pytest.fixture
def run(small_task, tmp_path):
    """A finished run of 9 rounds that keeps the checkpoints of 4, 8 and 9."""
    fedprior.run(small_task(), "fedadam", out=tmp_path / "run", **KEEPING)
    return tmp_path / "run"


# ---------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"checkpoint_every": 1}, [7, 8, 9]),
        ({"checkpoint_every": 2}, [6, 8, 9]),
        ({"checkpoint_every": 1, "keep_checkpoints": 1}, [9]),
        ({"checkpoint_every": 100}, [9]),
        ({"checkpoint_every": 100, "keep_every": 4}, [4, 8, 9]),
        ({"checkpoint_every": 1, "keep_every": 4, "keep_checkpoints": 1}, [4, 8, 9]),
        (KEEPING, [4, 8, 9]),
    ],
)
def test_the_last_checkpoints_are_kept_and_every_kth(small_task, tmp_path, settings, kept):
    fedprior.run(small_task(), "fedavg", out=tmp_path / "run", **{"rounds": 9, **settings})
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{number}.safetensors" for number in kept)
    assert [round_of(folder / f"{number}.safetensors") for number in kept] == kept
    assert (folder / "9.safetensors").samefile(tmp_path / "run" / "checkpoint.safetensors")


def test_where_there_are_no_links_checkpoints_are_copied(small_task, tmp_path, monkeypatch):
    def unsupported(path, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", unsupported)
    run = tmp_path / "run"
    fedprior.run(small_task(), "fedavg", out=run, **KEEPING)
    assert [round_of(run / "checkpoints" / f"{number}.safetensors") for number in (4, 8, 9)] == [4, 8, 9]
    whole = contents(run)
    fedprior.rollback(run, 4)
    assert round_of(run / "checkpoint.safetensors") == 4
    fedprior.resume(run, task=small_task())
    assert contents(run) == whole


def test_a_disk_without_room_for_one_more_name_is_one_line_and_the_run_goes_on(small_task, tmp_path, monkeypatch):
    fedprior.run(small_task(), "fedavg", out=tmp_path / "whole", **KEEPING)

    def full(path, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "hardlink_to", full)
        with pytest.raises(
            RunError, match=r"checkpoints/1\.safetensors: No space .*, then `fedprior resume .*` goes on"
        ):
            fedprior.run(small_task(), "fedavg", out=tmp_path / "run", **KEEPING)
    assert round_of(tmp_path / "run" / "checkpoint.safetensors") == 1
    fedprior.resume(tmp_path / "run", task=small_task())
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_a_full_disk_outside_of_the_run_says_nothing_of_it(run):
    from fedprior.runs.folder import RunFolder

    with pytest.raises(FullDiskError), RunFolder(run).resumable():
        raise FullDiskError(run.parent / "report.html", "no room")


# ---------------------------------------------------------------------- going back


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fedsparse", "fedsparse+scaffold", "fedtopk", "fedmix"])
@pytest.mark.parametrize("to", [4, 8])
def test_a_run_that_goes_back_ends_as_one_that_never_did(small_task, tmp_path, name, to):
    run = tmp_path / "run"
    fedprior.run(small_task(), name, out=run, keep="best", **KEEPING)
    whole = contents(run)
    assert len(whole) == 6
    fedprior.rollback(run, to)
    fedprior.resume(run, task=small_task())
    assert contents(run) == whole
    assert kept_rounds(run) == [4, 8, 9]


def test_nothing_of_the_later_rounds_is_left(small_task, tmp_path):
    """What is left is what a run has that was killed after that round."""
    run, killed = tmp_path / "run", tmp_path / "killed"
    settings = {**KEEPING, "keep": "best", "by": "-global_loss"}
    fedprior.run(small_task(), "fedadam", out=run, **settings)
    with pytest.raises(Broken):
        fedprior.run(small_task(), "fedadam", out=killed, progress=stop_after(4), **settings)
    fedprior.rollback(run, 4)
    assert {path.name for path in run.iterdir()} == {path.name for path in killed.iterdir()}
    for name in ("rounds.jsonl", "clients.bin", "best.safetensors", "config.toml"):
        assert (run / name).read_bytes() == (killed / name).read_bytes()
    assert list(read_clients(run).rounds) == [2, 4]
    assert [json.loads(line)["round"] for line in (run / "times.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert kept_rounds(run) == [4]
    assert not list(run.rglob("*.part"))


def test_the_best_model_up_to_then_comes_back(small_task, tmp_path):
    """Training gets worse from round 5 on, so no later evaluation replaces the best one of the earlier rounds."""
    run = tmp_path / "run"
    fedprior.run(small_task(), "fedavg", out=run, keep="best", by="-global_loss", **KEEPING)
    best = json.loads((run / "summary.json").read_text())["best_round"]
    assert best > 4, "else this test shows nothing"
    fedprior.rollback(run, 4)
    config = run / "config.toml"
    assert 'local_optimiser = "SGD(lr=0.05)"' in config.read_text()
    config.write_text(config.read_text().replace("SGD(lr=0.05)", "SGD(lr=3.0)"))
    with pytest.warns(FedpriorWarning, match=r"from round 5 on, local_optimiser = SGD\(lr=3.0\), before SGD\(lr=0.05"):
        result = fedprior.resume(run, task=small_task())
    assert result.summary["best_round"] == 4
    assert result.best is not None


def test_a_run_goes_back_twice_and_a_finished_one_to_its_end(small_task, run):
    whole = contents(run)
    fedprior.rollback(run, 9)
    assert contents(run) == whole
    fedprior.rollback(run, 8)
    fedprior.rollback(run, 4)
    fedprior.resume(run, task=small_task())
    assert contents(run) == whole


def test_a_diverged_run_goes_back(diverging_task, small_task, tmp_path):
    """Before the first round: a run that diverges in it has that checkpoint."""
    run = tmp_path / "run"
    with pytest.raises(fedprior.DivergedError, match="in round 1"):
        fedprior.run(diverging_task(), "fedavg", out=run, clients_per_round=3)
    fedprior.rollback(run, 0)
    assert not (run / "diverged.txt").exists()
    assert fedprior.resume(run, task=small_task((4, 4, 4))).summary["rounds"] == 5


def test_stacked_runs_keep_and_go_back_together(tmp_path):
    settings = {"rounds": "3", "clients_per_round": "2", "local_steps": "1", "device": "cpu", "clients": "300"}
    settings |= {"mode": "vectorised", "keep_every": "1", "keep_checkpoints": "1"}
    specs = sweeps.plan("mnist-mini", "fedavg", (0, 1), settings, tmp_path, {})
    sweeps.train(specs)
    whole = [contents(spec.out) for spec in specs]
    for spec in specs:
        assert kept_rounds(spec.out) == [1, 2, 3]
        fedprior.rollback(spec.out, 1)
    sweeps.train(sweeps.unfinished(specs))
    assert [contents(spec.out) for spec in specs] == whole


BEST = {"keep": "best", "by": "round", "rounds": 12, "checkpoint_every": 4, "evaluate_every": 3}
"""By a number that grows, so that each evaluation is the best so far, whatever the arithmetic."""


@pytest.fixture
def crashed(small_task, tmp_path):
    """A run that ends in round 7, after the checkpoint of round 4, and its best models: round 3's and round 6's."""
    run, models = tmp_path / "run", {}

    def progress(record):
        if record["round"] in (3, 6):
            models[record["round"]] = (run / "best.safetensors").read_bytes()
        if record["round"] == 7:
            raise Broken

    with pytest.raises(Broken):
        fedprior.run(small_task(), "fedavg", out=run, progress=progress, **BEST)
    assert (run / "best.safetensors").read_bytes() == models[6] != models[3], "else these tests show nothing"
    return run, models


def test_a_run_that_goes_on_after_a_crash_has_the_best_model_up_to_its_checkpoint(small_task, crashed):
    run, models = crashed
    result = fedprior.resume(run, task=small_task(), progress=lambda record: STOP)
    assert (result.summary["rounds"], result.summary["best_round"]) == (5, 3)
    assert (run / "best.safetensors").read_bytes() == models[3] == to_bytes(learned(result.best))
    assert (run / "checkpoints" / "4.best.safetensors").read_bytes() == models[3]


def test_a_run_that_goes_back_after_a_crash_has_the_best_model_up_to_then(small_task, crashed):
    run, models = crashed
    with pytest.raises(Broken):
        fedprior.resume(run, task=small_task(), progress=stop_after(5))
    fedprior.rollback(run, 4)
    assert (run / "best.safetensors").read_bytes() == models[3]


def test_a_run_that_starts_again_has_no_best_model_yet(small_task, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Broken):
        fedprior.run(small_task(), "fedavg", out=run, progress=stop_after(3), **BEST)
    assert (run / "best.safetensors").exists()
    result = fedprior.resume(run, task=small_task(), progress=lambda record: STOP)
    assert result.best is None
    assert not (run / "best.safetensors").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["1.safetensors"]


# ---------------------------------------------------------------------- killed at any moment


@pytest.fixture
def killed_at(monkeypatch):
    """Ends the process before or after the n-th time that a file is written, named, replaced or removed."""

    def arm(n):
        left = [n]

        def moment():
            left[0] -= 1
            if left[0] < 0:
                raise Broken

        def around(owner, name):
            really = getattr(owner, name)

            def call(what, *arguments, **more):
                if isinstance(what, Path) and what.name == locks.NAME:  # the kernel's lock ends with the process
                    return really(what, *arguments, **more)
                moment()
                result = really(what, *arguments, **more)
                moment()
                return result

            monkeypatch.setattr(owner, name, call)

        around(os, "fsync")
        for name in ("replace", "unlink", "hardlink_to"):
            around(Path, name)

    yield arm
    monkeypatch.undo()


def test_a_run_killed_while_it_keeps_a_checkpoint_keeps_it_when_it_goes_on(
    small_task, tmp_path, killed_at, monkeypatch
):
    settings = {"rounds": 3, "keep_every": 2, "keep_checkpoints": 1}
    fedprior.run(small_task(), "fedavg", out=tmp_path / "whole", **settings)
    resumed, finished = 0, False
    for n in range(100):
        run = tmp_path / f"killed-{n}"
        killed_at(n)
        try:
            fedprior.run(small_task(), "fedavg", out=run, **settings)
            finished = True
        except Broken:
            pass
        monkeypatch.undo()
        if finished:
            break
        if (run / "config.toml").exists():
            fedprior.resume(run, task=small_task())
            assert contents(run) == contents(tmp_path / "whole")
            assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["2.safetensors", "3.safetensors"]
            resumed += 1
    assert finished
    assert resumed > 15


def test_a_run_killed_while_it_goes_back_is_at_one_end_or_the_other(small_task, run, tmp_path, killed_at, monkeypatch):
    whole, killed = contents(run), 0
    for again in (False, True):
        for n in range(100):
            copy = tmp_path / f"copy-{again}-{n}"
            shutil.copytree(run, copy)
            killed_at(n)
            try:
                fedprior.rollback(copy, 4)
                break
            except Broken:
                killed += 1
            finally:
                monkeypatch.undo()
            if again:
                fedprior.rollback(copy, 4)
                assert kept_rounds(copy) == [4]
            fedprior.resume(copy, task=small_task())
            assert contents(copy) == whole
    assert killed > 20


def test_however_a_run_is_killed_every_kept_checkpoint_has_its_best_model(small_task, tmp_path, killed_at, monkeypatch):
    """Whether it trains or goes back; and so has the run that goes on, before its next round."""
    settings = {**BEST, "rounds": 3, "checkpoint_every": 1, "evaluate_every": 2, "keep_checkpoints": 1, "keep_every": 2}
    task, models, whole = small_task(), {0: None}, tmp_path / "whole"

    def best_of(run, kind=""):
        path = run / f"{kind}best.safetensors"
        return path.read_bytes() if path.exists() else None

    def train(run):
        fedprior.run(task, "fedavg", out=run, progress=lambda r: models.update({r["round"]: best_of(run)}), **settings)

    def check(run):
        for number in kept_rounds(run):
            assert best_of(run, f"checkpoints/{number}.") == models[number]
        if (run / "config.toml").exists():
            session = open_session(assemble(task, "fedavg", settings), run)
            assert best_of(run) == models[session.simulation.round]
            for number in kept_rounds(run):
                assert best_of(run, f"checkpoints/{number}.") == models[number]

    train(whole)
    assert len({*models.values()}) == 3, "else this test shows nothing"

    def go_back(run):
        shutil.copytree(whole, run)
        fedprior.rollback(run, 2)

    killed = 0
    for do in (train, go_back):
        for n in range(200):
            run = tmp_path / f"{do.__name__}-{n}"
            killed_at(n)
            try:
                do(run)
                break
            except Broken:
                killed += 1
            finally:
                monkeypatch.undo()
            check(run)
    assert killed > 60


# ---------------------------------------------------------------------- what is refused


def refused(run, to, match):
    """One line, and nothing on disk has changed."""
    before = {path: path.read_bytes() for path in run.rglob("*.*")}
    with pytest.raises(RunError, match=match) as caught:
        fedprior.rollback(run, to)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in run.rglob("*.*")} == before


def test_what_is_no_kept_round_is_refused(run, small_task, tmp_path):
    for to in (0, 5, 10, -1):
        refused(run, to, f"keeps no checkpoint of round {to}: it keeps 4, 8, 9$")
    shutil.rmtree(run / "checkpoints")
    refused(run, 4, "keeps no checkpoint of round 4: it keeps none")
    with pytest.raises(RunError, match="is not a run"):
        fedprior.rollback(tmp_path / "nowhere", 4)
    assert not (tmp_path / "nowhere").exists()
    for wrong in ("4", True, None):
        with pytest.raises(fedprior.SettingError, match="the number of a round"):
            fedprior.rollback(run, wrong)


@pytest.mark.parametrize("private", [{"epsilon": 8.0}, {"noise_multiplier": 1.0}], ids=str)
def test_a_private_run_does_not_go_back(small_task, tmp_path, private):
    """What it has told is told, and it would go on with the same noise on other uploads."""
    pytest.importorskip("dp_accounting")
    run = tmp_path / "run"
    fedprior.run(small_task(), "fedavg", out=run, **{**KEEPING, "rounds": 4}, **private)
    before = contents(run)
    with pytest.raises(RunError, match="is private: going back would not take back"):
        fedprior.rollback(run, 3)
    assert contents(run) == before


def test_a_private_run_is_not_told_to_go_back(small_task, tmp_path):
    losses = [1.0] * 12 + [100.0] * 3
    records = [{"round": i + 1, "train_loss": loss, "epsilon": 1.0} for i, loss in enumerate(losses)]
    (jump,) = jumps(records)
    assert line(jump, tmp_path).endswith("where 1 was usual")


def test_a_damaged_or_foreign_checkpoint_is_refused(run, small_task, tmp_path):
    place = run / "checkpoints" / "4.safetensors"
    data = bytearray(place.read_bytes())
    data[-3] ^= 8
    place.unlink()
    place.write_bytes(data)
    refused(run, 4, r"4\.safetensors is damaged: its checksum")
    place.write_bytes(data[:100])
    refused(run, 4, r"4\.safetensors is damaged")
    shutil.copy(run / "checkpoints" / "8.safetensors", place)
    refused(run, 4, r"4\.safetensors does not belong to the records")
    for name, seed in (("fedavg", 0), ("fedadam", 1)):
        other = tmp_path / f"{name}-{seed}"
        fedprior.run(small_task(), name, out=other, **{**KEEPING, "seed": seed, "rounds": 4})
        shutil.copy(other / "checkpoints" / "4.safetensors", place)
        refused(run, 4, r"4\.safetensors does not belong to the records")
        shutil.copy(other / "rounds.jsonl", run)
        refused(run, 4, r"4\.safetensors does not belong to the records")


def test_records_that_are_others_or_too_few_are_refused(run):
    rounds = run / "rounds.jsonl"
    text = rounds.read_text()
    rounds.write_text("".join(text.splitlines(keepends=True)[:3]))
    refused(run, 4, "does not belong to the records")
    rounds.write_text(text.replace('"bytes_up": ', '"bytes_up": 1', 1))
    refused(run, 4, "does not belong to the records")


def test_a_run_in_progress_is_left_alone(run):
    with locks.alone_in([run]):
        refused(run, 4, "is being trained by process")


# ---------------------------------------------------------------------- when the loss jumps


def records_of(losses):
    return [{"round": number, "train_loss": loss} for number, loss in enumerate(losses, 1)]


CALM = [2.0, 1.5, 1.2, 1.1, 0.9, 1.0, 0.8, 1.0, 0.7, 0.9, 1.1, 0.8]


@pytest.mark.parametrize(
    ("losses", "rounds"),
    [
        (CALM, []),
        ([*CALM, 9.0], []),  # one round, or two, of clients that are hard
        ([*CALM, 9.0, 9.0, 1.0], []),
        ([*CALM, 9.0, 7.0, 5.0], [13]),
        ([*CALM, 9.0, 7.0, 5.0, *[4.0] * 12], [13]),  # said once, however long it lasts
        ([*CALM, *[9.0] * 14, *[90.0] * 3], [13, 27]),
        ([*CALM, *[10.0**power for power in range(1, 9)]], [13]),
        ([*[0.5, 1.5] * 5, 2.9, 2.9, 2.9], []),  # more than twice as much as usual, but within twice the range
        ([*[0.5, 1.5] * 5, 3.1, 3.1, 3.1], [11]),
        ([*[9.0, 9.1] * 5, 18.0, 18.0, 18.0], []),  # far beyond the range, but less than twice as much
        ([*[9.0, 9.1] * 5, 18.2, 18.2, 18.2], [11]),
        ([-one for one in CALM] + [0.04, 0.04, 0.04], []),  # a loss may be negative
        ([-one for one in CALM] + [9.0, 9.0, 9.0], [13]),
        ([*CALM[:9], 9.0, 9.0, 9.0], []),  # too early to say what is usual
        ([*CALM, None, 9.0, float("nan"), 7.0, 5.0], [14]),
        ([*CALM, *[9.0] * 3, *[1.0] * 4, *[90.0] * 3], [13]),  # not over yet when it goes on
        ([*CALM, *[9.0] * 3, *[None] * 8, *[1.0] * 4, *[90.0] * 3], [13]),
    ],
)
def test_a_jump_is_three_rounds_in_a_row_far_above_what_is_usual(losses, rounds):
    records = records_of(losses)
    assert [jump.round for jump in jumps(records)] == rounds
    seen = [jump.round for end in range(1, len(records) + 1) if (jump := seen_now(records[:end]))]
    assert seen == rounds, "round by round, it is said once"


def train_with_accident(task, run, at, **settings):
    """A run whose server's weights are turned around after a round."""
    session = start_session(assemble(task, "fedavg", settings), run)

    def progress(record):
        if record["round"] == at:
            for weight in session.simulation.server["weights"].values():
                weight *= -20

    session.progress = progress
    drive([session])


def test_a_run_whose_loss_jumps_says_where_to_go_back_and_keeps_that(small_task, tmp_path, capsys):
    run = tmp_path / "run"
    settings = {"rounds": 24, "checkpoint_every": 1, "clients_per_round": 6, "keep_checkpoints": 2, "bound": 0.0}
    with pytest.warns(FedpriorWarning, match="the loss jumped") as caught:
        train_with_accident(small_task(), run, 15, **settings)
    (said,) = {str(warning.message) for warning in caught}
    assert said.startswith("the loss jumped in round 16: ")
    assert said.endswith(f"; `fedprior rollback {run} --to 14`")
    assert kept_rounds(run) == [14, 23, 24], "who reads of it later can still go back"
    from rich.console import Console

    console = Console(width=300)
    with console.capture() as shown:
        console.print(view(run, look(run)))
    assert said in shown.get()
    fedprior.rollback(run, 14)
    again = fedprior.resume(run, task=small_task())
    assert again.records == fedprior.run(small_task(), "fedavg", **settings).records


def test_a_jump_without_a_checkpoint_before_it_or_a_folder_says_so(small_task, tmp_path):
    settings = {"rounds": 19, "clients_per_round": 6, "bound": 0.0}
    for run, words in ((tmp_path / "run", "; no checkpoint is kept from before$"), (None, "was usual$")):
        with pytest.warns(FedpriorWarning, match=words):
            train_with_accident(small_task(), run, 15, **settings)
