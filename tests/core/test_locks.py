"""A run's folder has one writer: tried with real processes, killed ones among them, and on a disk without locks."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import fedprior
from fedprior import RunError
from fedprior.core import locks
from fedprior.core.errors import FedpriorWarning
from fedprior.report import read_run
from fedprior.report.write import write_report

HOLD = """
import sys
from pathlib import Path
from fedprior.core.locks import alone_in
with alone_in([Path(sys.argv[1])]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder():
    """Starts a process that holds a folder until its input ends."""
    started = []

    def hold(folder):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_killed_process_leaves_no_lock(holder, tmp_path):
    process = holder(tmp_path)
    with pytest.raises(RunError, match=f"is being trained by process {process.pid} on ") as refused, _alone(tmp_path):
        pass
    assert "\n" not in str(refused.value)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / locks.NAME).exists()
    with _alone(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_whether_a_process_is_the_writer_can_be_asked_without_disturbing_one(holder, tmp_path, monkeypatch):
    assert locks.held(tmp_path) is False
    process = holder(tmp_path)
    assert locks.held(tmp_path) is True
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert locks.held(tmp_path) is False
    # While it is asked, a writer that starts has patience.
    unlocked = []

    def sleep(seconds):
        unlocked.append(seconds)
        fcntl.flock(reader, fcntl.LOCK_UN)

    monkeypatch.setattr(locks.time, "sleep", sleep)
    with (tmp_path / locks.NAME).open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        with _alone(tmp_path):
            assert len(unlocked) == 1
    monkeypatch.setattr(locks, "fcntl", None)
    assert locks.held(tmp_path) is None


def _alone(folder):
    return locks.alone_in([folder])


@pytest.mark.parametrize("start", ["resume", "run"])
def test_a_second_writer_is_refused_and_the_records_stay_whole(small_task, holder, tmp_path, start):
    """What was seen: two that resume, 25 lines of 14 rounds, and a run that nothing can read."""
    task, run = small_task(rounds=4), tmp_path / "run"
    if start == "resume":
        fedprior.run(task, "fedavg", out=run, rounds=2)
        config = run / "config.toml"
        config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    before = {path.name: path.read_bytes() for path in run.rglob("*.*")} if run.exists() else {}

    def train():
        if start == "resume":
            return fedprior.resume(run, task=task)
        return fedprior.run(task, "fedavg", out=run)

    process = holder(run)
    with pytest.raises(RunError, match="is being trained by process"):
        train()
    assert {path.name: path.read_bytes() for path in run.rglob("*.*") if path.name != locks.NAME} == before
    process.communicate()
    assert len(train().records) == 4
    assert [json.loads(line)["round"] for line in (run / "rounds.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_readers_need_no_lock(small_task, holder, tmp_path):
    task, run = small_task(rounds=2), tmp_path / "run"
    fedprior.run(task, "fedavg", out=run)
    holder(run)
    assert read_run(run).finished
    write_report([run], tmp_path / "report.html")
    fedprior.export(run, tmp_path / "export", task=task, algorithm=fedprior.algorithm("fedavg", task.network))


def test_two_threads_of_one_process_are_two_writers(small_task, tmp_path):
    """`run` in a notebook's thread, and again in its next cell."""
    inside, refusals = threading.Event(), []

    def second(record):
        if not refusals:
            with pytest.raises(RunError, match=f"process {os.getpid()} on ") as refused:
                fedprior.resume(tmp_path / "run", task=small_task())
            refusals.append(refused.value)
        inside.set()

    fedprior.run(small_task(rounds=1), "fedavg", out=tmp_path / "run", progress=second)
    assert inside.is_set()
    assert len(refusals) == 1


def test_a_removed_lock_file_locks_nothing(tmp_path, monkeypatch):
    """Between opening the file and locking it: a third process would create a new one and lock that."""
    lock, removed = locks._lock, []

    def late(file, folder):
        lock(file, folder)
        if not removed:
            (folder / locks.NAME).unlink()
            removed.append(file)

    monkeypatch.setattr(locks, "_lock", late)
    with _alone(tmp_path), pytest.raises(RunError, match="is being trained"), _alone(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_causes_a_warning(tmp_path, monkeypatch, number):
    def refuse(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with pytest.warns(FedpriorWarning, match=r"the file system of .* has no locks"), _alone(tmp_path / "run"):
        (tmp_path / "run" / "config.toml").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.toml"]


def test_a_failed_start_leaves_no_files(small_task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fedprior.SettingError, match="not available"):
        fedprior.run(small_task(), "fedavg", out=Path("runs/new/run"), device="cuda:99")
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_folder_is_a_one_line_error(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunError, match=r"cannot write to .*file/run: Not a directory"),
        _alone(tmp_path / "file" / "run"),
    ):
        pass
