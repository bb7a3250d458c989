"""Jobs and limits from a run config; keys and certificates."""

import ssl
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

import torch
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

import fedprior
from fedprior import SettingError
from fedprior.engines.batches import ClientBatches
from fedprior.flower import Limits, named_job, own_job
from fedprior.flower.certificates import make_certificates

NAMED = {"task": "mnist-mini", "algorithm": "fedsparse", "settings": "clients=4; lambda0=1e-5; rounds=7; seed=3"}


def test_named_job_is_what_fedprior_run_would_train():
    job, task = named_job(NAMED), fedprior.task("mnist-mini", seed=3, clients=4)
    assert (job.clients, job.settings.rounds, job.settings.seed, job.settings.batch_size) == (4, 7, 3, 10)
    assert job.algorithm.settings["lambda0"] == 1e-5
    assert str(job.algorithm.settings["server_threshold_optimiser"]) == "Adamax(lr=0.0175)"  # the task's own setting
    key = fedprior.core.keys.key(1)
    x, y, test_x, test_y = job.part(2)
    assert torch.equal(x, task.data.x[task.data.train[2]])
    assert torch.equal(test_y, task.data.test_y[task.data.test[2]])
    alone = fedprior.FederatedData.from_clients([(x, y, test_x, test_y)])
    ours, theirs = ClientBatches(alone, 0, job.workload, key), ClientBatches(task.data, 2, job.workload, key)
    assert all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in zip(ours, theirs, strict=True))


def test_precision_is_a_setting_of_a_deployment_too():
    job = named_job({**NAMED, "settings": "clients=4; wire=int8/int4; entropy=false"})
    assert job.algorithm.wire == fedprior.wire.Wire("int8", "int4", entropy=False)
    assert job.config()["run"]["wire"] == "int8/int4"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"settings": "lambda0"}, "key=value; key=value"),
        ({"settings": "lambda=3"}, "did you mean 'lambda0'"),
        ({"settings": "attack=scale"}, "attack is a setting of the simulator"),
        ({"settings": "messages=count"}, "messages is a setting of the simulator"),
        ({"settings": "wire=int3"}, "wire must be"),
        ({"task": "mnist-min"}, "did you mean 'mnist-mini'"),
        ({"algorithm": "fedspars"}, "did you mean 'fedsparse'"),
        ({"settings": "clients=3; clients_per_round=4"}, "there are only 3 clients"),
    ],
)
def test_wrong_names_are_one_clear_error(config, message):
    with pytest.raises(SettingError, match=message):
        named_job({**NAMED, **config})


def test_own_job():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    config = {"algorithm": "fedsparse", "settings": "server_optimiser=Adam(lr=0.01, eps=1e-7); epochs=2"}
    test = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 0])
    job = own_job(config, model, torch.zeros(4), clients=2, test=test, batch_size=6)
    assert str(job.algorithm.settings["server_optimiser"]) == "Adam(lr=0.01, eps=1e-07)"
    assert (job.settings.batch_size, job.settings.epochs, job.settings.clients_per_round) == (6, 2, 2)
    with pytest.raises(SettingError, match="unknown setting 'alpha'"):
        own_job({**config, "settings": "alpha=1"}, model, torch.zeros(4), clients=2)
    with pytest.raises(SettingError, match="attack is a setting of the simulator"):
        own_job(config, model, torch.zeros(4), clients=2, attack="scale")


def test_limits_of_a_run_config():
    limits = Limits.of({"round-seconds": 5, "min-replies": 2, "task": "x"})
    assert (limits.round_seconds, limits.min_replies, limits.attempts) == (5.0, 2, 3)
    for wrong in ({"round-seconds": 0}, {"min-replies": -1}, {"attempts": "many"}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            Limits.of(wrong)


def test_certificates(tmp_path):
    folder = tmp_path / "certificates"
    done = make_certificates(folder, ["server.example", "192.0.2.7"], 2)
    assert [line.split()[0] for line in done] == ["ca.pem", "server.pem", "node-0", "node-1"]
    ca, server = (x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes()) for name in ("ca", "server"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "127.0.0.1"]
    assert server.not_valid_after_utc - datetime.now(UTC) > timedelta(days=360)
    ssl.create_default_context().load_cert_chain(folder / "server.pem", folder / "server.key")
    private = load_ssh_private_key((folder / "node-1").read_bytes(), None)
    public = load_ssh_public_key((folder / "node-1.pub").read_bytes())
    assert private.public_key() == public
    for secret in ("ca.key", "server.key", "node-0", "node-1"):
        assert stat.S_IMODE((folder / secret).stat().st_mode) == 0o600


TURN = """
import sys
from pathlib import Path

import fedprior.flower

not_a_devices = {"fedprior.report", "fedprior.runs.drive", "fedprior.flower.strategy", "fedprior.flower.server"}
not_a_devices |= {"datasets", "requests", "flwr", "grpc", "rich", "matplotlib", "cryptography"}
print(sorted(not_a_devices & set(sys.modules)))

from fedprior.flower import Server, named_job
from fedprior.flower.node import Node, Order

chosen = "clients=3; clients_per_round=3; local_steps=1; local_optimiser=SGD(lr=0.1, momentum=0.9)"
job = named_job({"task": "mnist-mini", "algorithm": "fedsparse", "settings": chosen})
server = Server.new(job, "0" * 16)
order = Order(server.packet(server.begin(), 0), 1, "0" * 16, 0)
Node.new(job, 0, job.part(0), Path(sys.argv[1])).respond(order)
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""


def test_a_device_loads_no_module_that_it_does_not_need(tmp_path):
    """Neither for the import nor for a turn: torch's compiler and sympy double the time that a start takes."""
    done = subprocess.run([sys.executable, "-c", TURN, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"
