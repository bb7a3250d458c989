"""A full disk: one line with the path, and nothing half-written. The system's limit on a file's size stands for it."""

import json
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

import fedprior
import small_disk
from fedprior import RunError
from fedprior.core import files
from fedprior.report.write import write_report


@contextmanager
def room_for(size):
    """No file may become larger; Python ignores the signal, so that writing is an OSError without a path."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def refused(path):
    with pytest.raises(RunError) as caught:
        yield
    assert str(caught.value) == f"cannot write {path}: File too large"


def tree(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    with room_for(10), refused(path):
        files.write_atomically(path, "x" * 11)
    assert tree(tmp_path) == {}
    files.write_atomically(path, "old")
    with room_for(10), refused(path):
        files.write_atomically(path, b"x" * 11)
    assert list(tree(tmp_path).values()) == [b"old"]
    link = tmp_path / "link"
    link.symlink_to(path)
    files.write_atomically(link, "new")
    assert (link.is_symlink(), path.read_text()) == (True, "new")
    files.write_atomically(Path("/dev/null"), "nothing")
    assert Path("/dev/null").is_char_device()


def test_a_line_is_appended_completely_or_not_at_all(tmp_path):
    path = tmp_path / "lines"
    files.append_line(path, "first")
    with room_for(9), refused(path):
        files.append_line(path, "second")
    assert path.read_text() == "first\n"
    files.append_line(path, "second")
    assert path.read_text() == "first\nsecond\n"


def test_a_full_disk_leaves_no_empty_folder(small_task, tmp_path):
    with room_for(0), pytest.raises(RunError, match=r"cannot write to .*run: File too large"):
        fedprior.run(small_task(), "fedavg", out=tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["config.toml", "partition.json", "rounds.jsonl", "checkpoint.safetensors"])
def test_a_run_on_a_full_disk_names_the_file_and_can_be_resumed(small_task, tmp_path, name):
    task, run = small_task(rounds=6, checkpoint_every=6, evaluate_every=1), tmp_path / "run"
    whole = fedprior.run(task, "fedavg", out=tmp_path / "whole")
    room = (tmp_path / "whole" / name).stat().st_size - 1
    with room_for(room), pytest.raises(RunError, match=r"cannot write .*run/.*: File too large") as caught:
        fedprior.run(task, "fedavg", out=run)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.part"))
    lines = (run / "rounds.jsonl").read_bytes() if run.exists() else b""
    assert not lines or lines.endswith(b"\n")
    if (run / "config.toml").exists():
        algorithm = fedprior.algorithm("fedavg", task.network)
        again = fedprior.resume(run, task=task, algorithm=algorithm)
    else:
        again = fedprior.run(task, "fedavg", out=run)
    assert again.records == whole.records
    assert (run / "rounds.jsonl").read_text() == (tmp_path / "whole" / "rounds.jsonl").read_text()


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9, 0.99])
def test_a_disk_that_fills_up_keeps_the_last_checkpoint_and_says_how_to_go_on(small_task, tmp_path, share):
    task, run = small_task(rounds=6, checkpoint_every=1, evaluate_every=1), tmp_path / "run"
    with small_disk.disk() as whole_disk:
        whole = fedprior.run(task, "fedavg", out=tmp_path / "whole")
    with small_disk.disk(share * whole_disk.written), pytest.raises(RunError) as caught:
        fedprior.run(task, "fedavg", out=run)
    said = re.fullmatch(
        rf"cannot write {run}/\S+: No space left on device\. Free some space on the disk of {run}, "
        rf"then `fedprior resume {run}` goes on from its (start|last checkpoint, which is whole)",
        str(caught.value),
    )
    assert said
    assert ("checkpoint" in said[1]) == (run / "checkpoint.safetensors").exists()
    assert not list(run.glob("*.part"))
    lines = (run / "rounds.jsonl").read_text()
    assert lines == "" or lines.endswith("}\n")
    algorithm = fedprior.algorithm("fedavg", task.network)
    if said[1] != "start":  # the checkpoint alone, before anything is repaired, has a server to use
        fedprior.evaluate(run, task=task, algorithm=algorithm)
    again = fedprior.resume(run, task=task, algorithm=algorithm)
    assert again.records == whole.records
    for name in ("rounds.jsonl", "model.safetensors", "clients.bin"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_full_disk_outside_of_a_run_is_one_line_too(tmp_path):
    with small_disk.disk(3), pytest.raises(RunError) as caught:
        files.write_atomically(tmp_path / "file", "four")
    no_room = "No space left on device. Free some space on the disk of"
    assert str(caught.value) == f"cannot write {tmp_path / 'file'}: {no_room} {tmp_path}"
    assert tree(tmp_path) == {}


def test_a_report_is_replaced_completely_or_not_at_all(small_task, tmp_path):
    run = tmp_path / "run"
    fedprior.run(small_task(), "fedavg", out=run)
    page = tmp_path / "report.html"
    with room_for(10_000), refused(page):
        write_report([run], page)
    assert not page.exists()
    write_report([run], page)
    before = tree(tmp_path)
    with room_for(100), refused(page):
        write_report([run], page)
    assert tree(tmp_path) == before
    with room_for(100_000_000):
        write_report([run], page, tables_to=tmp_path / "tables", figures_to=tmp_path / "figures")
    before = tree(tmp_path)
    size = len((tmp_path / "report.html").read_bytes())
    assert all(len(content) > 0 for content in before.values())
    with room_for(size), pytest.raises(RunError, match=r"cannot write .*figures/.*png: File too large"):
        write_report([run], page, tables_to=tmp_path / "tables", figures_to=tmp_path / "figures")
    assert tree(tmp_path) == before


def test_an_export_is_complete_or_absent(small_task, tmp_path):
    task = small_task()
    result = fedprior.run(task, "fedavg")
    with room_for(1000), refused(tmp_path / "small"):
        fedprior.export(result, tmp_path / "small", onnx=False)
    assert list(tmp_path.iterdir()) == []
    fedprior.export(result, tmp_path / "small", onnx=False)
    assert json.loads((tmp_path / "small" / "model.json").read_text())["format"]
    assert len(tree(tmp_path)) == 3
