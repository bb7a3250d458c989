"""One protocol: a change to any of its functions is a change to all engines, and none of them has a copy of its own."""

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

import torch
from local_grid import LocalGrid

import fedprior
from fedprior.core import trees
from fedprior.em import protocol
from fedprior.engines.build import build
from fedprior.engines.modes import engine
from fedprior.flower import HardEM, Server

RUN = "0123456789abcdef"
SRC = Path(fedprior.__file__).parent


def halved(tree):
    return {**tree, "weights": {name: value / 2 for name, value in tree["weights"].items()}}


CHANGES = {
    "cohort": lambda clients: [(client + 1) % 6 for client in clients],
    "broadcast_keys": lambda keys: keys + 1,
    "speak": lambda spoken: protocol.Spoken(halved(spoken.said), halved(spoken.coded)),
    "hear": halved,
    "take_turn": lambda taken: (taken[0]._replace(upload=halved(taken[0].upload)), taken[1]),
    "conclude": lambda concluded: concluded._replace(server=halved(concluded.server)),
}


@pytest.fixture
def after_a_round(make_job, quick, tmp_path):
    """The server's state after one round of FedDrop, whose packets differ from client to client, in an engine."""

    def state(kind):
        job = make_job("feddrop", {"rounds": 1}, torch.float64, local_optimiser="SGD(lr=0.1)")
        if kind == "flower":
            server = Server.new(job, RUN)
            HardEM(server, quick).start(LocalGrid(job, tmp_path))
            return dict(trees.leaves(server.state))
        simulation = build(job.algorithm, job.network, job.data, job.settings)
        engine([simulation], kind).step(evaluate=False)
        return dict(trees.leaves(simulation.server))

    return state


@pytest.mark.parametrize("name", CHANGES)
def test_every_engine_runs_every_function_of_the_protocol(name, after_a_round, monkeypatch):
    plain, function = after_a_round("in-turn"), getattr(protocol, name)
    monkeypatch.setattr(protocol, name, lambda *given, **named: CHANGES[name](function(*given, **named)))
    loop, stacked, flower = (after_a_round(kind) for kind in ("in-turn", "vectorised", "flower"))
    assert any((loop[path] - value).abs().max() > 1e-4 for path, value in plain.items()), "the change is one"
    for other in (stacked, flower):
        assert other.keys() >= loop.keys()
        for path, value in loop.items():
            torch.testing.assert_close(other[path], value, rtol=0, atol=1e-9, check_dtype=False)


@pytest.mark.parametrize("folder", ["engines", "flower", "trained", "runs"])
def test_no_engine_has_its_own_copy_of_a_protocol_step(folder):
    own = re.compile(r"\b[em]_step\(|\.broadcast\(|\.pack\(|\brestore\(|Purpose\.(COHORT|BROADCAST|ADOPT|COMMIT)")
    for path in (SRC / folder).rglob("*.py"):
        assert not own.search(path.read_text(encoding="utf-8")), path
