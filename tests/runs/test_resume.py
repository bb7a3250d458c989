"""A run that was broken and resumed leaves, byte for byte, what a run that was never broken leaves."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

import fedprior
from fedprior import RunError
from fedprior.core import keys, trees
from fedprior.core.errors import FedpriorWarning
from fedprior.core.keys import Purpose, Turn
from fedprior.report.records import read_run
from fedprior.runs import checkpoint
from fedprior.runs.folder import RunFolder
from test_contract import NAMES, simulate

FILES = ("config.toml", "rounds.jsonl", "model.safetensors")


class Broken(BaseException):
    """Stands for the end of the process: no `except Exception` of the library may see it."""


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def stop_after(rounds):
    def progress(record):
        if record["round"] == rounds:
            raise Broken

    return progress


def broken_run(task, name, folder, rounds, **settings):
    """A run that ended after some of its rounds."""
    with pytest.raises(Broken):
        fedprior.run(task, name, out=folder, progress=stop_after(rounds), **{"checkpoint_every": 1, **settings})
    return folder


# ---------------------------------------------------------------------- kill -9


def test_a_run_killed_anywhere_and_resumed_equals_an_unbroken_one(tmp_path, plain_arithmetic):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    # More rounds than it can have done before a busy machine lets the kill through; how many count is decided then.
    command = [sys.executable, "-m", "fedprior", "run", "mnist-mini", "--algorithm", "fedsparse", "--rounds", "9999"]
    command += ["--clients-per-round", "2", "--seed", "5", "--device", "cpu", "--out", str(killed)]
    command += ["--set", "checkpoint_every=1", "--set", "evaluate_every=9999", "--set", "clients=500"]
    moments = random.Random(time.time_ns())
    for least in (1, 4):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and lines(killed / "rounds.jsonl") < least:
                time.sleep(0.002)
            time.sleep(moments.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
        command = [sys.executable, "-m", "fedprior", "resume", str(killed)]
    assert not (killed / "model.safetensors").exists()
    assert lines(killed / "rounds.jsonl") >= 4
    config = killed / "config.toml"
    config.write_text(
        config.read_text().replace("\nrounds = 9999\n", f"\nrounds = {lines(killed / 'rounds.jsonl') + 2}\n")
    )
    fedprior.resume(killed)

    whole.mkdir()
    shutil.copy(killed / "config.toml", whole)
    fedprior.resume(whole)  # from its config alone, so from the start
    assert contents(killed) == contents(whole)
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (killed, whole))
    assert one | {"seconds": 0} == other | {"seconds": 0}


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


# ---------------------------------------------------------------------- broken at every write


@pytest.fixture
def broken_at(monkeypatch):
    """Ends the process at the n-th moment at which a run touches the disk."""

    def arm(n):
        left = [n]

        def moment():
            left[0] -= 1
            if left[0] < 0:
                raise Broken

        fsync, replace, append = os.fsync, Path.replace, RunFolder.append

        def broken_fsync(file):
            try:
                moment()
            except Broken:
                os.ftruncate(file, os.fstat(file).st_size // 2)  # half a file
                raise
            fsync(file)

        def broken_replace(path, target):
            moment()
            result = replace(path, target)
            moment()
            return result

        def broken_append(folder, record):
            moment()
            append(folder, record)
            text = folder.rounds.read_bytes()
            try:
                moment()
            except Broken:
                folder.rounds.write_bytes(text[:-7])  # half a line
                raise
            moment()

        monkeypatch.setattr(os, "fsync", broken_fsync)
        monkeypatch.setattr(Path, "replace", broken_replace)
        monkeypatch.setattr(RunFolder, "append", broken_append)

    yield arm
    monkeypatch.undo()


@pytest.mark.parametrize(("rounds", "every"), [(2, 1), (3, 2)])
def test_a_run_broken_at_any_write_and_resumed_equals_an_unbroken_one(
    small_task, tmp_path, broken_at, monkeypatch, rounds, every
):
    settings = {"rounds": rounds, "evaluate_every": 2, "checkpoint_every": every, "seed": 4}
    fedprior.run(small_task(), "fedadam", out=tmp_path / "whole", **settings)
    finished, resumed = False, 0
    for n in range(100):
        folder = tmp_path / f"broken-{n}"
        broken_at(n)
        try:
            fedprior.run(small_task(), "fedadam", out=folder, **settings)
            finished = True
        except Broken:
            pass
        monkeypatch.undo()
        if finished:
            break
        if not (folder / "config.toml").exists():
            with pytest.raises(RunError, match=r"no config\.toml"):
                fedprior.resume(folder, task=small_task())
            continue
        fedprior.resume(folder, task=small_task())
        assert contents(folder) == contents(tmp_path / "whole"), f"broken at moment {n}"
        resumed += 1
    assert finished
    assert resumed > 15


# ---------------------------------------------------------------------- stopped after some rounds


@pytest.mark.parametrize("name", fedprior.ALGORITHMS)
def test_a_run_stopped_twice_and_resumed_equals_an_unbroken_one(small_task, tmp_path, name):
    """Server optimisers' moments, controls and every client's last accuracy must have survived."""
    whole = fedprior.run(small_task(), name, out=tmp_path / "whole", checkpoint_every=1)
    folder = broken_run(small_task(), name, tmp_path / "broken", 2)
    with pytest.raises(Broken):
        fedprior.resume(folder, task=small_task(), progress=stop_after(4))
    again = fedprior.resume(folder, task=small_task())
    assert contents(folder) == contents(tmp_path / "whole")
    assert again.records == whole.records
    for key, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[key], value)


def test_resuming_needs_the_server_optimisers_moments(small_task, tmp_path):
    """If they were lost, the test above would notice: without them the run ends elsewhere."""
    fedprior.run(small_task(), "fedadam", out=tmp_path / "whole")
    folder = broken_run(small_task(), "fedadam", tmp_path / "broken", 2)
    tensors = safetensors.torch.load_file(folder / "checkpoint.safetensors")
    moments = {name for name in tensors if name.startswith("optimiser/weights/exp_avg/")}
    assert len(moments) == 6
    assert all(tensors[name].abs().sum() > 0 for name in moments)


def test_a_run_without_a_checkpoint_starts_again(small_task, tmp_path):
    fedprior.run(small_task(), "fedavg", out=tmp_path / "whole", checkpoint_every=100)
    folder = broken_run(small_task(), "fedavg", tmp_path / "broken", 3, checkpoint_every=100)
    assert not (folder / "checkpoint.safetensors").exists()
    assert lines(folder / "rounds.jsonl") == 3
    fedprior.resume(folder, task=small_task())
    assert contents(folder) == contents(tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing(small_task, tmp_path):
    folder = tmp_path / "run"
    result = fedprior.run(small_task(), "fedsparse", out=folder)
    before = contents(folder) | {"summary": (folder / "summary.json").read_bytes()}
    again = fedprior.resume(folder, task=small_task())
    assert contents(folder) | {"summary": (folder / "summary.json").read_bytes()} == before
    assert again.summary == result.summary
    assert again.records == result.records


def test_half_a_line_at_the_end_of_the_records_is_dropped(small_task, tmp_path):
    fedprior.run(small_task(), "fedavg", out=tmp_path / "whole", checkpoint_every=1)
    folder = broken_run(small_task(), "fedavg", tmp_path / "broken", 3)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "bytes_up": 12')
    fedprior.resume(folder, task=small_task())
    assert contents(folder) == contents(tmp_path / "whole")


def test_progress_continues_with_the_remaining_rounds(small_task, tmp_path):
    folder = broken_run(small_task(), "fedavg", tmp_path / "run", 2)
    seen = []
    fedprior.resume(folder, task=small_task(), progress=lambda record: seen.append(record["round"]))
    assert seen == [3, 4, 5]


# ---------------------------------------------------------------------- what cannot be resumed


@pytest.fixture
def folder(small_task, tmp_path):
    """A run that stopped after round 3 of 5."""
    return broken_run(small_task(), "fedadam", tmp_path / "run", 3)


def refused(folder, task, match):
    """One line, and nothing on disk has changed."""
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    with pytest.raises(RunError, match=match) as caught:
        fedprior.resume(folder, task=task)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before


class Elsewhere:
    """The root key of a simulation on a device without numbers, which every machine has."""

    device = torch.device("meta")

    def __init__(self, root):
        self.root = root

    def __int__(self):
        return int(self.root)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_loaded_to_the_simulations_device(name, tmp_path):
    """Also what a round added to the server, such as the layers that pruning has closed."""
    first, second = simulate(name), simulate(name)
    first.step(evaluate=False)
    checkpoint.save(tmp_path / "checkpoint.safetensors", first)
    second.root = Elsewhere(second.root)
    second.server = trees.tree_map(lambda leaf: leaf.to("meta"), second.server)
    checkpoint.load(tmp_path / "checkpoint.safetensors", second)
    restored = dict(trees.leaves(second.server))
    assert restored.keys() == dict(trees.leaves(first.server)).keys()
    assert {leaf.device.type for leaf in restored.values()} == {"meta"}


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 2000, -1])
def test_a_truncated_checkpoint_is_refused(small_task, folder, keep):
    path = folder / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, small_task(), "damaged")


@pytest.mark.parametrize("seed", range(8))
def test_a_checkpoint_with_a_flipped_bit_is_refused(small_task, folder, seed):
    path = folder / "checkpoint.safetensors"
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    draw = random.Random(seed)
    # Half in the header, half in the tensors; a flip in the recorded seconds is the one that nothing notices.
    place = draw.randrange(8, header) if seed % 2 else draw.randrange(header, len(data))
    data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    refused(folder, small_task(), "checkpoint")


def test_a_file_of_another_kind_is_refused_as_a_checkpoint(small_task, folder):
    path = folder / "checkpoint.safetensors"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    refused(folder, small_task(), "damaged")
    safetensors.torch.save_file({"server/weights/conv.weight": torch.zeros(4, 1, 3, 3)}, path)
    refused(folder, small_task(), "not a fedprior checkpoint")


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fedavg", {}), ("fedprox", {}), ("fedsparse", {}), ("fedavgm", {}), ("fedadam", {"seed": 1})],
)
def test_another_runs_checkpoint_is_refused(small_task, folder, tmp_path, name, settings):
    other = broken_run(small_task(), name, tmp_path / "other", 3, **settings)
    shutil.copy(other / "checkpoint.safetensors", folder / "checkpoint.safetensors")
    refused(folder, small_task(), "does not (belong to|match) the")


def test_a_checkpoint_of_another_task_is_refused(small_task, folder, tmp_path):
    other = broken_run(small_task((3,) * 9), "fedadam", tmp_path / "other", 3)
    shutil.copy(other / "checkpoint.safetensors", folder / "checkpoint.safetensors")
    refused(folder, small_task(), "does not (belong to|match) the")
    refused(other, small_task(), "the data or task has changed")


def test_records_that_do_not_reach_the_checkpoint_are_refused(small_task, folder):
    path = folder / "rounds.jsonl"
    text = path.read_bytes()
    path.write_bytes(b"".join(text.splitlines(keepends=True)[:2]))
    refused(folder, small_task(), "does not hold rounds 1 to 3")
    path.unlink()
    refused(folder, small_task(), "does not hold rounds 1 to 3")
    for damage in (b"{nonsense}\n", b"3\n", b"\xff\xfe\n", b"\n"):
        path.write_bytes(damage + text)
        refused(folder, small_task(), "damaged")


def test_a_missing_or_damaged_config_is_refused(small_task, folder, tmp_path):
    path = folder / "config.toml"
    text = path.read_text()
    for damage, match in [
        (b"[run\n", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"", r"no table \[run\]"),
        (b"run = 3\n", r"no table \[run\]"),
        (text.replace("[algorithm]", "[other]").encode(), r"no table \[algorithm\]"),
        (text.replace('label = "fedadam"\n', "").encode(), "no 'label'"),
    ]:
        path.write_bytes(damage)
        refused(folder, small_task(), match)
    path.unlink()
    refused(folder, small_task(), r"no config\.toml")
    with pytest.raises(RunError, match="is not a run"):
        fedprior.resume(tmp_path / "nowhere")


def test_a_config_with_impossible_settings_is_refused(small_task, folder):
    path = folder / "config.toml"
    text = path.read_text()
    for old, new in [("rounds = 5", 'rounds = "many"'), ("rounds = 5", "rounds = 0"), ("rounds = 5", "ruonds = 5")]:
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(fedprior.SettingError, match="rounds"):
            fedprior.resume(folder, task=small_task())


def test_learning_rates_and_rounds_may_be_changed_in_the_config_before_resuming(small_task, folder):
    """After a run has diverged that is what its user wants."""
    path = folder / "config.toml"
    path.write_text(path.read_text().replace("rounds = 5", "rounds = 6").replace("Adam(lr=0.001)", "Adam(lr=0.0001)"))
    with pytest.warns(
        FedpriorWarning, match=r"from round 4 on, server_optimiser = Adam\(lr=0.0001\), before Adam\(lr=0.001\)"
    ):
        assert fedprior.resume(folder, task=small_task()).summary["rounds"] == 6


def test_an_extended_run_is_unfinished_until_its_new_end(small_task, folder):
    assert fedprior.resume(folder, task=small_task()).summary["rounds"] == 5
    path = folder / "config.toml"
    path.write_text(path.read_text().replace("rounds = 5", "rounds = 8"))
    with pytest.raises(Broken):
        fedprior.resume(folder, task=small_task(), progress=stop_after(6))
    assert not read_run(folder).finished
    assert fedprior.resume(folder, task=small_task()).summary["rounds"] == 8
    assert read_run(folder).finished


def test_fewer_rounds_than_trained_are_refused_and_as_many_end_the_run_at_once(small_task, folder):
    path = folder / "config.toml"
    text = path.read_text()
    path.write_text(text.replace("rounds = 5", "rounds = 2"))
    said = "has 3 rounds already: rounds in its config.toml must be at least that, got 2"
    with pytest.raises(fedprior.RunError, match=said):
        fedprior.resume(folder, task=small_task())
    path.write_text(text.replace("rounds = 5", "rounds = 3"))
    summary = fedprior.resume(folder, task=small_task()).summary
    whole = fedprior.run(small_task(), "fedadam", rounds=3).summary
    assert summary["rounds"] == 3
    assert summary["global_accuracy"] == whole["global_accuracy"]


def first_turn(seed, client, clients):
    """The round in which a client of cohorts of one has its first turn."""
    for number in range(1, 50):
        key = Turn(keys.key(seed), number).key(Purpose.COHORT)
        if keys.choose(key, clients, 1) == [client]:
            return number
    return 50


def test_a_diverged_run_keeps_its_last_good_checkpoint(diverging_task, small_task, tmp_path):
    folder = tmp_path / "run"
    seed = next(seed for seed in range(100) if first_turn(seed, 1, 3) == 4)
    with pytest.raises(fedprior.DivergedError, match="client 1 diverged in round 4"):
        fedprior.run(diverging_task(), "fedavg", out=folder, clients_per_round=1, rounds=9, seed=seed)
    assert lines(folder / "rounds.jsonl") == 3
    tensors = safetensors.torch.load_file(folder / "checkpoint.safetensors")
    assert all(value.isfinite().all() for name, value in tensors.items() if name.startswith("server/"))
    assert read_run(folder).trouble.startswith("client 1 diverged in round 4")
    # With that client's data repaired, the run continues from there.
    assert fedprior.resume(folder, task=small_task((4, 4, 4))).summary["rounds"] == 9
    assert not (folder / "diverged.txt").exists()


def test_a_server_that_diverges_does_not_replace_its_last_good_checkpoint(small_task, tmp_path):
    task, folder = small_task(), tmp_path / "run"
    algorithm = fedprior.algorithm("fedsparse", task.network, server_threshold_optimiser="SGD(lr=1e38)")
    with pytest.raises(fedprior.DivergedError, match="round 1"):
        fedprior.run(task, algorithm, out=folder, checkpoint_every=1)
    tensors = safetensors.torch.load_file(folder / "checkpoint.safetensors")
    assert all(value.isfinite().all() for name, value in tensors.items() if name.startswith("server/"))


def test_a_setting_that_was_edited_is_told_with_the_round_from_which_it_holds(tmp_path, recwarn):
    def edited(**values):
        text = config.read_text()
        for name, value in values.items():
            text, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
            assert count == 1, name
        config.write_text(text)

    def told(rounds):
        recwarn.clear()
        fedprior.resume(tmp_path / "run", rounds=rounds)
        return [str(one.message) for one in recwarn]

    task = fedprior.task("mnist-mini", clients=20)
    small = {"clients_per_round": 2, "local_steps": 1, "device": "cpu", "workers": 1}
    fedprior.run(task, fedprior.algorithm("fedsparse", task.network), rounds=1, out=tmp_path / "run", **small)
    config = tmp_path / "run" / "config.toml"
    assert told(2) == [], "more rounds are asked for, not edited"
    edited(lambda0="5e-4", local_steps="2", workers="2", evaluate_every="3")
    assert told(3) == [
        f"{tmp_path / 'run'}: from round 3 on, local_steps = 2, before 1",
        f"{tmp_path / 'run'}: from round 3 on, lambda0 = 0.0005, before 5e-06",
    ]
    assert told(4) == [], "it was told once"
