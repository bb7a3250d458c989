"""Real processes, real TLS: `make deploy` in a shorter form. And the app that users copy."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

from flwr.app import Context, RecordDict
from local_grid import LocalGrid

import fedprior
from fedprior.flower import client_app, named_job
from fedprior.flower.apps import serve
from fedprior.flower.deploy import APP, _cleared, deploy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups")

# Two devices are enough to be left behind. Tests in a shell's background, or under nohup, ignore these signals, and so
# would what they start.
INTERRUPTED = """
import signal
from fedprior.flower import deploy

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
deploy.deploy.__kwdefaults__["nodes"] = 2
deploy.main()
"""


def descendants(*markers):
    """Processes that have these texts in their command line or environment; a zombie has neither."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if all(marker.encode() in text for marker in markers) and int(entry.name) != os.getpid():
            found.append(entry.name)
    return found


def test_a_deployment_survives_a_killed_device(tmp_path, monkeypatch, plain_arithmetic):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings = "local_steps=3; device=cpu"
    # No limit of ours is reached: Flower itself misses the killed device, by its heartbeats, within a minute.
    limits = {"round_seconds": 1800, "seconds": 3600}
    summary = deploy(tmp_path / "run", nodes=2, rounds=2, kill_after=1, settings=settings, **limits)
    assert summary["engine"] == "flower"
    assert (summary["rounds"], summary["task"], summary["algorithm"]) == (2, "mnist-mini", "fedsparse")
    first, second = (json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines())
    assert second["clients"] == [0]
    assert [fault["client"] for fault in second["faults"]] == [1]

    # What travelled over TLS between processes is what the simulator computes.
    job = named_job({"task": "mnist-mini", "algorithm": "fedsparse", "settings": f"clients=2; {settings}"})
    task = fedprior.Task("mnist-mini", job.network, job.data)
    result = fedprior.run(task, job.algorithm, rounds=1, clients_per_round=2, local_steps=3, batch_size=10, workers=1)
    assert sorted(first.pop("clients")) == [0, 1]
    assert len(first.pop("examples")) == 2  # what the clients say that they have
    assert first.keys() == result.records[0].keys()
    for key, value in result.records[0].items():
        # Both in float32; T = 0.001 makes a thousandfold of what the last bit of a norm does to a gate.
        near = {"abs": 1e-4} if key in ("tv_mean", "tv_max") else {"rel": 1e-4 if "loss" in key else 1e-12}
        assert first[key] == pytest.approx(value, **near), key
    assert descendants(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("wrong", "message"), [({"settings": "lambda=3"}, "did you mean"), ({"rounds": 0}, "rounds must be at least 1")]
)
def test_a_mistake_is_found_before_anything_starts(wrong, message, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(fedprior.SettingError, match=message):
        deploy(tmp_path / "run", **wrong)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rounds.jsonl").touch()
    with pytest.raises(fedprior.RunError, match="exists"):
        deploy(tmp_path / "run")


def test_after_a_failure_logs_are_kept_and_keys_are_not(tmp_path):
    for name in ("certificates/node-0", "superlink.db", "superlink.log"):
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).touch()
    with pytest.raises(fedprior.RunError), _cleared(tmp_path / "a"):
        raise fedprior.RunError("failed")
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["superlink.log"]
    with pytest.raises(KeyboardInterrupt), _cleared(tmp_path / "a"):
        raise KeyboardInterrupt
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_deployment_leaves_no_process(number, tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, "--out", str(tmp_path / "run")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "the server is up" not in process.stdout.readline():
            assert process.poll() is None
        while len(descendants(str(tmp_path), "flower-supernode")) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == 128 + number
    assert "every process has been ended" in rest or number != signal.SIGINT
    assert descendants(str(tmp_path)) == []
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith("fedprior-deploy-")] == []


@pytest.fixture
def example(monkeypatch):
    """The modules of examples/flower-app."""
    monkeypatch.syspath_prepend(str(APP))
    return importlib.import_module("fedprior_app.job")


def test_the_app_trains_its_own_model_on_folders_of_data(example, tmp_path):
    draw = np.random.default_rng(0)
    patterns = draw.normal(size=(4, 1, 8, 8))
    for client in range(3):
        folder = tmp_path / f"data-{client}"
        folder.mkdir()
        for part, count in (("", 40), ("test_", 10)):
            y = draw.integers(4, size=count)
            np.save(folder / f"{part}x.npy", (patterns[y] + draw.normal(size=(count, 1, 8, 8))).astype(np.float32))
            np.save(folder / f"{part}y.npy", y)

    class Grid(LocalGrid):
        def context(self, node):
            client = self.nodes[node]
            config = {"partition-id": client, "data-dir": str(tmp_path / f"data-{client}")}
            return Context(1, node, config, RecordDict(), {})

    config = {"task": "own", "algorithm": "fedavg", "settings": "rounds=4", "out": str(tmp_path / "run")}
    job = example.make_job(config)
    grid = Grid(job, tmp_path)
    grid.app = client_app(lambda _: job, example.make_data)
    summary = serve(job, grid, config)
    records = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert records[-1]["train_loss"] < records[0]["train_loss"]
    assert summary["local_accuracy"] > 0.5
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_accuracy"] is None  # no test set here


def test_the_apps_config_names_settings_that_exist(example):
    import tomllib

    from flwr.cli.config_utils import load_and_validate

    from fedprior.flower import Limits
    from fedprior.flower.resumed import OWN

    config, warnings = load_and_validate(APP / "pyproject.toml")
    assert warnings == []
    assert config["project"]["dependencies"] == []
    chosen = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert named_job(chosen).clients == 3
    assert Limits.of(chosen) == Limits()
    assert not set(chosen) - {"task", "algorithm", "settings", "devices"} - OWN
