"""The live view, of runs at every stage; and TensorBoard."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from fedprior.report.reading import round_seconds
from fedprior.report.tensorboard import TensorBoard
from fedprior.report.watch import look, view, watch


def shown(path):
    console = Console(file=io.StringIO(), width=150)
    console.print(view(path, look(path)))
    return console.file.getvalue()


def test_watch_shows_a_run_at_every_stage(write_run, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    assert f"waiting for a run in {folder}" in shown(folder).replace("\n", "")
    write_run(folder, rounds=40, finished=False)
    monkeypatch.setattr("fedprior.report.watch.held", lambda folder: True)
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("")
    assert "0/40" in shown(folder)
    assert "starting" in shown(folder)
    (folder / "rounds.jsonl").write_text("".join(lines[:20]) + lines[20][:30])
    (folder / "times.jsonl").write_text("".join(f'{{"round": {r}, "seconds": 3.0}}\n' for r in range(1, 21)) + '{"rou')
    text = shown(folder)
    record = json.loads(lines[19])
    assert "20/40" in text
    assert f"{100 * record['global_accuracy']:.1f}%" in text
    assert f"{record['train_loss']:.3f}" in text
    assert "3.00" in text
    assert "0:01:00 left" in text
    written = (folder / "rounds.jsonl").stat().st_mtime
    monkeypatch.setattr("fedprior.report.watch.time.time", lambda: written + 7203)
    assert "no record for 2:00:03" in shown(folder)
    (folder / "rounds.jsonl").write_text("nonsense\n")
    assert "rounds.jsonl is damaged in line 1" in shown(folder)


def test_watch_says_that_a_process_is_gone_and_ends(write_run, tmp_path):
    write_run(tmp_path / "runs" / "killed", rounds=40, finished=False)
    write_run(tmp_path / "runs" / "done", rounds=40)
    hold = "import sys; from pathlib import Path; from fedprior.core.locks import alone_in\n"
    hold += "with alone_in([Path(sys.argv[1])]): print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(tmp_path / "runs" / "killed")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert "gone" not in shown(tmp_path / "runs")
        process.kill()
        process.wait()
        console = Console(file=io.StringIO(), width=250)
        watch(tmp_path / "runs", console)  # returns: nothing goes on
        text = console.file.getvalue()
        assert "stopped: its process is gone" in text
        assert f"continue it: fedprior resume {tmp_path / 'runs' / 'killed'}" in text
        assert text.count("finished") == 1


def test_watch_shows_faults(write_run, tmp_path):
    folder = write_run(tmp_path / "run", rounds=3)
    faults = [{"node": "7", "client": 2, "what": "no reply in 600 s"}, {"node": "9", "client": None, "what": "garbage"}]
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    records[0]["faults"], records[1]["faults"] = faults[:1], faults
    records[1]["quarantined"], records[2]["stragglers"] = [{"node": "9", "client": None}], [4]
    for record, clipped in zip(records, ([1], [1, 2], [3, 5, 6]), strict=True):
        record["clipped"] = clipped
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = " ".join(shown(folder).split())
    assert "3 faults, the last in round 2: node 9: garbage; " in text
    assert "quarantined: node 9 (round 2); " in text
    assert "late: client 4 (round 3)" in text
    assert "clipped: client 3 (round 3), client 5 (round 3), client 6 (round 3) and 2 others" in text


def test_watch_shows_a_folder_of_runs_and_ends_with_them(paperlike):
    console = Console(file=io.StringIO(), width=150)
    watch(paperlike, console)  # returns, because all are finished
    text = console.file.getvalue()
    assert text.count("finished") == 18
    assert "▁" in text
    assert "█" in text


def test_if_a_round_has_several_times_the_last_counts(tmp_path):
    (tmp_path / "times.jsonl").write_text('{"round": 1, "seconds": 5}\n[]\n{"round": 1, "seconds": 2.5}\nx\n')
    assert round_seconds(tmp_path) == {1: 2.5}
    assert round_seconds(tmp_path / "nowhere") == {}


def test_watch_waits_for_a_run_and_an_interrupt_ends_it_quietly(tmp_path, monkeypatch):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("fedprior.report.watch.time.sleep", sleep)
    console = Console(file=io.StringIO(), width=200)
    watch(tmp_path / "run", console)
    assert len(waits) == 3
    assert "waiting for a run" in console.file.getvalue()


def test_tensorboard_has_the_records_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = [
        {"round": 1, "bytes_up": 10, "bytes_down": 20, "train_loss": 2.0},
        {"round": 2, "bytes_up": 30, "bytes_down": 40, "train_loss": 1.5, "global_accuracy": 0.5, "floored": ["fc"]},
    ]
    with TensorBoard(tmp_path) as board:
        for record in records:
            board(record)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("bytes")] == [(1, 30.0), (2, 100.0)]
    assert [(e.step, e.value) for e in events.Scalars("global_accuracy")] == [(2, 0.5)]
    assert sorted(events.Tags()["scalars"]) == ["bytes", "bytes_down", "bytes_up", "global_accuracy", "train_loss"]
