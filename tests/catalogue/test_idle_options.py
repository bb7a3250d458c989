"""What settings of algorithms and tasks are: each says it, and one that has no effect is refused."""

import pytest
import torch
from torch import nn

import fedprior
from fedprior import SettingError
from fedprior.catalogue.algorithms import ALGORITHMS, asked_algorithm, entry, recorded_algorithm
from fedprior.catalogue.tasks import TASKS
from fedprior.core.network import Network
from fedprior.core.options import check_effect, options_of, resolve
from fedprior.core.settings import MACHINE, RUN_OPTIONS

LINEAR = Network(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.ones(4))
CONV = Network(
    nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
    torch.ones(1, 6, 6),
)

IDLE = {
    # An algorithm, what has no effect on one network, that network, another setting or network with which it has one.
    "feddrop conv": ("feddrop", {"conv_rate": 0.2}, LINEAR, {}, CONV, "no gated convolution between"),
    "feddrop linear": ("feddrop", {"linear_rate": 0.2}, CONV, {}, LINEAR, "no gated linear layer between"),
    "feddrop noise": (
        "feddrop",
        {"noise": True, "linear_rate": 0.0, "input_rate": 0.0, "output_rate": 0.0},
        LINEAR,
        {"input_rate": 0.1},
        LINEAR,
        "no unit is ever left out",
    ),
    "feddrop input": ("feddrop", {"input_rate": 0.2, "ungated": ("0",)}, LINEAR, {"ungated": ()}, LINEAR, "reads the"),
    "fednarrow conv": ("fednarrow", {"conv_rate": 0.2}, LINEAR, {}, CONV, "no convolution whose units"),
    "fednarrow linear": ("fednarrow", {"linear_rate": 0.2}, CONV, {}, LINEAR, "no linear layer whose units"),
    "weights have no rate": (
        "fednarrow",
        {"linear_rate": 0.2, "structured": False},
        LINEAR,
        {"structured": True},
        LINEAR,
        "concerns units",
    ),
    "weights have no layers": (
        "fedsparse",
        {"linear_gates": "inputs", "structured": False},
        LINEAR,
        {"structured": True},
        LINEAR,
        "concerns units",
    ),
    "output": ("fedsparse", {"gate_output": True, "structured": False}, LINEAR, {"structured": True}, LINEAR, "units"),
    "ungated": ("fedsparse", {"ungated": ("0",), "structured": False}, LINEAR, {"structured": True}, LINEAR, "units"),
    "closed form": (
        "fedsparse",
        {"server_optimiser": None, "server_threshold_optimiser": "Adamax(lr=0.1)"},
        LINEAR,
        {"server_optimiser": "SGD(lr=1.0)"},
        LINEAR,
        "the closed-form M-step sets the thresholds",
    ),
    "following nothing": (
        "fedsparse",
        {"server_optimiser": "none", "thresholds": "follow"},
        LINEAR,
        {"server_optimiser": "SGD(lr=1.0)"},
        LINEAR,
        "the closed-form M-step sets the thresholds",
    ),
    "two sizes": (
        "fednarrow",
        {"sparsity": 0.3, "max_parameters": 60},
        LINEAR,
        {"max_parameters": None},
        LINEAR,
        "one of",
    ),
    "one component": ("fedmix", {"components": 1, "spread": 0.2}, LINEAR, {"components": 2}, LINEAR, "one component"),
}


@pytest.mark.parametrize("case", IDLE)
def test_an_idle_setting_is_refused_in_new_runs_and_resumed_in_old_ones(case):
    name, given, network, more, other, words = IDLE[case]
    with pytest.raises(SettingError, match=f"has no effect: .*{words}") as caught:
        fedprior.algorithm(name, network, **given)
    assert "\n" not in str(caught.value)
    assert recorded_algorithm(name, network, given).settings
    fedprior.algorithm(name, other, **{**given, **more})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"partition": "shards", "alpha": 0.5}, "alpha=0.5 has no effect: partition=shards does not look at it"),
        ({"partition": "iid", "shards": 3}, "shards=3 has no effect: partition=iid"),
        ({"partition": "column", "column": "writer", "clients": 7}, "clients=7 has no effect: partition=column"),
    ],
)
def test_an_idle_task_option_is_refused_before_data_are_loaded(given, words):
    with pytest.raises(SettingError, match=words):
        fedprior.task("hub", dataset="nobody/nothing", **given)


def test_a_tasks_usual_settings_are_never_refused_as_idle():
    """mnist-mini has a rate for the server's thresholds; the closed-form M-step does without it."""
    usual = {"server_threshold_optimiser": "Adamax(lr=0.0175)"}
    assert asked_algorithm("fedsparse", LINEAR, {"server_optimiser": "none"}, usual).server is None


def test_nothing_is_refused_at_its_default():
    for name in ALGORITHMS:
        for network in (LINEAR, CONV):
            fedprior.algorithm(name, network)
    for name, build in TASKS.items():
        check_effect(options_of(build), resolve(build, {}, name))


def test_every_setting_is_described_and_the_report_knows_machine_settings():
    factories = [*(entry(name).build for name in ALGORITHMS), *TASKS.values()]
    known = [*RUN_OPTIONS.values(), *(option for factory in factories for option in options_of(factory).values())]
    assert {option.name for option in known if option.about.machine} == MACHINE
    assert [option.name for option in known if not option.about.what] == []
