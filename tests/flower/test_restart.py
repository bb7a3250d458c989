"""A server that died and was started again ends where an unbroken one ends, with one unbroken file of records."""

import json

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

import safetensors
import safetensors.torch
import torch
from local_grid import LocalGrid

import fedprior
import small_disk
from fedprior import RunError, SettingError
from fedprior.flower import server_checkpoint
from fedprior.flower.apps import serve
from fedprior.flower.memory import Memory
from fedprior.flower.server import Server

FILES = ("rounds.jsonl", "model.safetensors")
LIMITS = {"round-seconds": 0.2, "start-seconds": 0.2, "poll-seconds": 0.001, "wait-for": 6}
RUN = "0123456789abcdef"


class Broken(BaseException):
    """Stands for the end of the process."""


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", ["fedavg", "fedsparse", "fedsparse+scaffold"])
def test_resumed_equals_unbroken(name, moment, make_job, tmp_path, monkeypatch):
    """Killed around the checkpoint of round 2 of 5. Clients have then moved on, and must go back with the server."""
    job = make_job(name, {"rounds": 5, "clients_per_round": 3}, local_optimiser="SGD(lr=0.1)")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    serve(job, LocalGrid(job, tmp_path / "a"), {**LIMITS, "out": str(whole)})

    save = server_checkpoint.save

    def breaking(path, server, records):
        if moment == "after":
            save(path, server, records)
        if server.round == 2:
            raise Broken
        save(path, server, records)

    monkeypatch.setattr(server_checkpoint, "save", breaking)
    with pytest.raises(Broken):
        serve(job, LocalGrid(job, tmp_path / "b"), {**LIMITS, "out": str(broken)})
    monkeypatch.setattr(server_checkpoint, "save", save)
    serve(job, LocalGrid(job, tmp_path / "b"), {**LIMITS, "resume": str(broken)})

    assert contents(broken) == contents(whole)
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (broken, whole))
    assert one | {"seconds": 0} == other | {"seconds": 0}
    assert one["engine"] == "flower"


@pytest.mark.parametrize("share", [0.4, 0.8, 0.99])
def test_a_servers_full_disk_is_one_line_and_the_run_goes_on(share, make_job, tmp_path):
    """Clients' memories are on disks of their own."""
    job = make_job("fedavg", {"rounds": 5, "clients_per_round": 3})
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with small_disk.disk() as disk:
        serve(job, LocalGrid(job, tmp_path / "a"), {**LIMITS, "out": str(whole)})
    with small_disk.disk(share * disk.written), pytest.raises(RunError) as caught:
        serve(job, LocalGrid(job, tmp_path / "b"), {**LIMITS, "out": str(broken)})
    again = f"""then `flwr run . --run-config 'resume="{broken}"'` goes on from its last checkpoint"""
    assert "No space left on device. Free some space on the disk of" in str(caught.value)
    assert again in str(caught.value)
    assert not list(broken.glob("*.part"))
    serve(job, LocalGrid(job, tmp_path / "b"), {**LIMITS, "resume": str(broken)})
    assert contents(broken) == contents(whole)


def test_a_folder_older_than_the_setting_precision_continues(make_job, tmp_path):
    job = make_job("fedavg")
    run = tmp_path / "run"
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "out": str(run)})
    lines = (run / "config.toml").read_text().splitlines()
    older = [line for line in lines if not line.startswith(("wire =", "entropy ="))]
    assert len(older) == len(lines) - 2
    (run / "config.toml").write_text("\n".join(older) + "\n")
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "resume": str(run)})
    other = make_job("fedavg", {"wire": "int8"})
    with pytest.raises(RunError, match="was started with wire = float32, not int8"):
        serve(other, LocalGrid(other, tmp_path), {**LIMITS, "resume": str(run)})


def test_what_cannot_be_resumed_is_one_clear_error(make_job, tmp_path):
    job = make_job("fedavg")
    run = tmp_path / "run"
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "out": str(run)})
    with pytest.raises(RunError, match="exists"):
        serve(job, LocalGrid(job, tmp_path), {**LIMITS, "out": str(run)})
    other = make_job("fedavg", {"batch_size": 3})
    with pytest.raises(RunError, match="was started with batch_size = 4, not 3"):
        serve(other, LocalGrid(other, tmp_path), {**LIMITS, "resume": str(run)})
    with pytest.raises(RunError, match=r"has no config\.toml"):
        serve(job, LocalGrid(job, tmp_path), {**LIMITS, "resume": str(tmp_path / "none")})
    simulated = tmp_path / "simulated"
    fedprior.run("mnist-mini", out=simulated, rounds=1, clients_per_round=1, local_steps=1)
    with pytest.raises(RunError, match="is not a Flower run; `fedprior resume"):
        serve(job, LocalGrid(job, tmp_path), {**LIMITS, "resume": str(simulated)})
    before = sorted(run.iterdir())
    with pytest.raises(RunError, match="is a Flower run: continue it with `flwr run`"):
        fedprior.resume(run, task=fedprior.Task("small", job.network, job.data), algorithm=job.algorithm)
    assert sorted(run.iterdir()) == before
    data = bytearray((run / "checkpoint.safetensors").read_bytes())
    data[-3] ^= 8
    (run / "checkpoint.safetensors").write_bytes(data)
    with pytest.raises(RunError, match="checksum does not match"):
        serve(job, LocalGrid(job, tmp_path), {**LIMITS, "resume": str(run)})


HEAD = {"format", "run", "round", "seconds", "numbers", "accepted", "records", "checksum"}
"""The lines of a checkpoint's head in every version so far."""


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("format", "fedprior-checkpoint-1", "not a fedprior checkpoint of kind fedprior-flower-checkpoint-1"),
        ("round", "many", "damaged"),
        ("numbers", "3", "damaged"),
        ("accepted", "[1]", "damaged"),
        ("accepted", "{", "damaged"),
        ("examples", "{", "damaged"),
        ("numbers", '{"state": 1}', "does not match the model"),
        ("numbers", '{"state/weights": 1}', "does not match the model"),
        ("numbers", '{"moments": 1}', "does not match the model"),
        ("run", RUN, "does not belong to the run"),
        *((key, None, "damaged|not a fedprior checkpoint") for key in sorted(HEAD)),
    ],
)
def test_a_checkpoint_that_is_not_this_servers_is_one_clear_error(make_job, tmp_path, key, value, words):
    """`None`: the line is not there."""
    server, path = Server.new(make_job("fedsparse"), RUN[::-1]), tmp_path / "checkpoint.safetensors"
    server_checkpoint.save(path, server, "123")
    assert server_checkpoint.load(path, server) == "123"
    with safetensors.safe_open(str(path), framework="pt") as file:
        head = file.metadata()
    assert head.keys() == HEAD | {"examples"}  # which is younger, and may be missing
    head = {name: line for name, line in {**head, key: value}.items() if line is not None}
    path.write_bytes(safetensors.torch.save(safetensors.torch.load_file(path), head))
    with pytest.raises(RunError, match=words) as refusal:
        server_checkpoint.load(path, server)
    assert "\n" not in str(refusal.value)


def test_a_run_has_one_server_at_a_time(make_job, tmp_path):
    """As when it is resumed twice, or while the server of a killed SuperLink has not ended yet."""
    job, run, refused = make_job("fedavg"), tmp_path / "run", []

    class Second(LocalGrid):
        def get_node_ids(self):
            if not refused:
                with pytest.raises(RunError, match="is being trained by process") as caught:
                    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "resume": str(run)})
                refused.append(caught.value)
            return super().get_node_ids()

    serve(job, Second(job, tmp_path), {**LIMITS, "out": str(run)})
    assert len(refused) == 1
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "resume": str(run)})  # when the first has ended, it is free


def test_wrong_limits_leave_no_folder(make_job, tmp_path):
    job = make_job("fedavg")
    for wrong in ({"min-replies": 99}, {"attempts": 0}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            serve(job, LocalGrid(job, tmp_path), {**LIMITS, **wrong, "out": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


def test_a_finished_deployment_may_get_more_rounds(make_job, tmp_path):
    job, longer = make_job("fedsparse", {"rounds": 2}), make_job("fedsparse", {"rounds": 4})
    run, whole = tmp_path / "run", tmp_path / "whole"
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "out": str(run)})
    serve(longer, LocalGrid(longer, tmp_path), {**LIMITS, "resume": str(run)})
    serve(longer, LocalGrid(longer, tmp_path), {**LIMITS, "out": str(whole)})
    assert contents(run) == contents(whole)


def test_a_client_that_lost_its_disk_is_named(make_job, tmp_path):
    job, longer = (make_job("scaffold", {"rounds": rounds, "clients_per_round": 6}) for rounds in (2, 4))
    run, grid = tmp_path / "run", LocalGrid(job, tmp_path)
    serve(job, grid, {**LIMITS, "out": str(run)})
    (lost,) = tmp_path.glob("state/*/client-3.safetensors")
    lost.unlink()
    serve(longer, LocalGrid(longer, tmp_path), {**LIMITS, "resume": str(run)})
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [record.get("forgot") for record in records] == [None, None, [3], None]


# ---------------------------------------------------------------------- a client's memory


def remembering(value):
    return {"control": {"fc.bias": torch.full((3,), float(value))}}


def test_a_client_returns_to_the_turn_that_the_server_used(tmp_path):
    def turn(accepted, number, value):
        memory = Memory(tmp_path, RUN, 1, remembering(0))
        found = float(memory.recall(accepted)["control"]["fc.bias"][0])
        memory.keep(number, remembering(value))
        return found, memory.lost

    assert turn(0, 1, 10) == (0, False)
    assert turn(0, 2, 20) == (0, False)  # the upload of round 1 was never used
    assert turn(2, 5, 50) == (20, False)
    assert turn(2, 5, 51) == (20, False)  # the server died in round 5 and does it again
    assert turn(5, 7, 70) == (51, False)
    assert turn(3, 8, 80) == (0, True)  # the server used an upload that this disk does not know


def test_a_lost_or_foreign_memory_is_a_new_start(tmp_path):
    memory = Memory(tmp_path, RUN, 1, remembering(0))
    memory.recall(0)
    memory.keep(1, remembering(7))
    for damage in (lambda: memory.path.write_bytes(b"half"), memory.path.unlink):
        damage()
        again = Memory(tmp_path, RUN, 1, remembering(0))
        assert float(again.recall(1)["control"]["fc.bias"].sum()) == 0
        assert again.lost
    other = {"1/control/fc.bias": torch.ones(4)}  # of another shape
    memory.path.write_bytes(safetensors.torch.save(other))
    assert float(Memory(tmp_path, RUN, 1, remembering(0)).recall(1)["control"]["fc.bias"].sum()) == 0


def test_without_memory_nothing_is_written(tmp_path):
    memory = Memory(tmp_path, RUN, 1, {})
    assert memory.recall(3) == {}
    memory.keep(4, {})
    assert list(tmp_path.iterdir()) == []
