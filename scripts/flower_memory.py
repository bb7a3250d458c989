"""How much memory a deployed server needs for a round: large uploads from many devices, all of them waiting at once.

    python scripts/flower_memory.py                       # 64 uploads of 100 MB, FedAvg
    python scripts/flower_memory.py --uploads 4 16 --megabytes 8 --keep 1e9

The devices are a stand-in: each reply is made when the server pulls it, from one message in memory. What Flower's own
processes need is not in it. Prints one line of JSON for each number of uploads: the process' peak so far, in MB.
"""

import argparse
import json
import resource
import sys
import time

import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

import fedprior
from fedprior import wire
from fedprior.core import trees
from fedprior.core.settings import Settings
from fedprior.flower import HardEM, Job, Limits, Server
from fedprior.flower.messages import write_answer, write_introduction
from fedprior.flower.node import Answer, Node

EXAMPLE = torch.zeros(1000)


def make_job(megabytes: float, uploads: int, algorithm: str) -> Job:
    """A linear layer of this size, on one example for each of its clients."""
    network = fedprior.Network(nn.Linear(1000, max(2, round(megabytes * 250))), EXAMPLE)
    settings = Settings(rounds=1, clients_per_round=uploads, local_steps=1, device="cpu", evaluate_every=100)
    return Job("own", network, fedprior.algorithm(algorithm, network), settings, uploads)


class Devices(Grid):
    """All devices at once. Every reply has memory of its own, as if it had come over a network."""

    def __init__(self, job: Job) -> None:
        self.job, self.waiting, self.upload = job, {}, b""
        self.nodes = list(range(1, job.clients + 1))
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        one = [(EXAMPLE.unsqueeze(0), torch.zeros(1, dtype=torch.int64))] * 2
        node = Node.new(job, 0, (*one[0], *one[1]), None)
        self.introduction, self.layout = write_introduction(node), node.up
        params = trees.tree_map(torch.ones_like, node.network.params())
        self.upload = wire.encode({"weights": params}, self.layout, 1)

    def push_messages(self, messages):
        names = []
        for message in messages:
            name = f"m{len(self.waiting)}-{message.metadata.dst_node_id}-{message.metadata.message_type}"
            message.metadata.__dict__["_message_id"] = name
            self.waiting[name] = message
            names.append(name)
        return names

    def pull_messages(self, message_ids):
        return [self.reply(self.waiting[name]) for name in message_ids]

    def reply(self, message: Message) -> Message:
        client = self.nodes.index(message.metadata.dst_node_id)
        if message.metadata.message_type == MessageType.QUERY:
            content = self.introduction.copy()
            content["numbers"]["client"] = client
        else:
            numbers = {"client": client, "round": 1, "examples": 1 + client % 3, "loss": 1.0, "tested": 0}
            content = write_answer(Answer(bytes(bytearray(self.upload)), numbers))
        return Message(content, reply_to=message)

    def get_node_ids(self):
        return self.nodes

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


def peak() -> float:
    """The most memory this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def measure(megabytes: float, uploads: int, algorithm: str, keep: float) -> dict[str, float]:
    """One round, from the first greeting to the M-step."""
    job = make_job(megabytes, uploads, algorithm)
    devices = Devices(job)
    del job
    before, began = peak(), time.perf_counter()
    server = Server.new(devices.job, "0123456789abcdef")
    HardEM(server, Limits(keep_megabytes=keep, poll_seconds=0.01)).start(devices)
    assert server.round == 1
    found = {"uploads": uploads, "megabytes": round(len(devices.upload) / 1e6, 1), "folds": server.folds}
    return {**found, "before_mb": round(before), "peak_mb": round(peak()), "s": round(time.perf_counter() - began, 1)}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--uploads", type=int, nargs="+", default=[64])
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--keep", type=float, default=Limits.keep_megabytes, help="the server's keep-megabytes")
    given = parser.parse_args()
    for uploads in given.uploads:
        print(json.dumps(measure(given.megabytes, uploads, given.algorithm, given.keep)), flush=True)


if __name__ == "__main__":
    main()
