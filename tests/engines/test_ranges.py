"""The settings of a run: each at its border, and one step beyond; and what has no effect beside the others."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedprior
from fedprior.catalogue.algorithms import algorithm_settings
from fedprior.core.choices import ATTACKS, PRECISIONS
from fedprior.core.errors import SettingError
from fedprior.core.options import plain
from fedprior.core.settings import RUN_OPTIONS, Settings
from fedprior.em import statistics
from fedprior.engines import attack
from fedprior.engines.build import check_run, check_useful
from fedprior.wire import precision

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("fine", "wrong"),
    [
        *(({name: 1}, {name: 0}) for name in ("rounds", "clients_per_round", "batch_size", "epochs", "evaluate_every")),
        *(({name: 1}, {name: 0}) for name in ("local_steps", "checkpoint_every", "workers", "patience")),
        ({"attack": "scale", "attackers": 0.999}, {"attack": "scale", "attackers": 1.0}),
        ({"attack": "scale", "attackers": 0.0}, {"attack": "scale", "attackers": -0.001}),
        ({"statistics_momentum": 1.0}, {"statistics_momentum": 1.001}),
        ({"statistics_momentum": 0.001}, {"statistics_momentum": 0.0}),
        ({"seed": 2**63 - 1}, {"seed": 2**63}),
        ({"seed": -(2**63)}, {"seed": -(2**63) - 1}),
        ({"mode": "vectorised"}, {"mode": "vector"}),
        ({"messages": "encode", "mode": "in-turn"}, {"messages": "encode", "mode": "vectorised"}),
        ({"wire": "int8/int4"}, {"wire": "int8/int3"}),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused(fine: dict, wrong: dict) -> None:
    Settings(**fine)
    with pytest.raises(SettingError):
        Settings(**wrong)


def world(norm: bool = False, tested: bool = True) -> fedprior.Task:
    """Ten clients of a small network."""
    layers = [nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if norm else []), nn.ReLU(), nn.Linear(4, 2)]
    x, y = torch.linspace(-1, 1, 12).view(4, 3), torch.tensor([0, 1, 0, 1])
    return fedprior.own_task(nn.Sequential(*layers), [(x, y, x, y) if tested else (x, y)] * 10)


def test_a_cohort_is_at_most_all_clients() -> None:
    task = world()
    chosen = fedprior.algorithm("fedavg", task.network)
    check_run(Settings(clients_per_round=5), chosen, task.network, 5, uneven=False)
    with pytest.raises(SettingError, match="only 4 clients"):
        check_run(Settings(clients_per_round=5), chosen, task.network, 4, uneven=False)


IDLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # What has no effect, with what it has one, and a word of why.
    "attackers": (
        {"attackers": 0.1},
        {"attack": "scale"},
        "there is no attack; give attack=sign-flip, scale, constant or backdoor",
    ),
    "few attackers": ({"attack": "scale", "attackers": 0.04}, {"attackers": 0.06}, "of 10 clients that is none"),
    "attack": ({"attack": "scale"}, {"attackers": 0.1}, "there are no attackers"),
    "bound": (
        {"bound": 4.0, "noise_multiplier": 1.0},
        {"noise_multiplier": None},
        "private, and clip bounds every upload",
    ),
    "clip": ({"clip_quantile": 0.5}, {"clip": 1.0}, "nothing is clipped; give clip"),
    "private clip": ({"clip_quantile": 0.5}, {"noise_multiplier": 0.1}, "nothing is clipped; give clip"),
    "delta": ({"delta": 1e-6}, {"noise_multiplier": 1.0}, "not private; give epsilon, its budget, or noise_mul"),
    "epochs": ({"epochs": 2, "local_steps": 3}, {"local_steps": None}, "local_steps=3 says how long"),
    "entropy": ({"entropy": False, "wire": "float16"}, {"wire": "float32/int8"}, "the wire is float16"),
    "warmup": ({"lr_schedule": "cosine(warmup=5)", "rounds": 5}, {"rounds": 6}, "warmup=5 is as long as the run"),
    "statistics": ({"statistics": "local"}, {"norm": True}, "no BatchNorm"),
    "report": (
        {"statistics": "batch", "report_statistics": "running", "norm": True},
        {"statistics": "shared"},
        "none to report",
    ),
    "final": (
        {"statistics": "local", "report_statistics": "final", "norm": True},
        {"report_statistics": "running"},
        "always keeps those of its final model",
    ),
    "momentum": (
        {"statistics": "local", "statistics_momentum": 0.5, "norm": True},
        {"statistics": "shared"},
        "statistics=shared only",
    ),
    "unseen": ({"unseen": 0.04}, {"unseen": 0.1}, "of 10 clients that is none"),
    "untested": ({"unseen": 0.1, "tested": False}, {"tested": True}, "it needs test examples"),
    "by": ({"by": "sparsity"}, {"keep": "best"}, "give one of them"),
    "patience": ({"patience": 3, "tested": False}, {"tested": True}, "it needs test examples"),
    "keep": ({"keep": "best", "tested": False}, {"by": "sparsity"}, "it needs test examples"),
    "server rate": (
        {"server_lr_schedule": "linear"},
        {"server_optimiser": "SGD(lr=1.0)"},
        "M-step of fedavg has no learning rate; give it a server_optimiser",
    ),
    "rate of Rprop": ({"lr_schedule": "linear", "local_optimiser": "Rprop()"}, {"local_optimiser": "SGD()"}, "Rprop"),
}


def asked(given: dict[str, Any]) -> None:
    of_run = {name: value for name, value in given.items() if name in RUN_OPTIONS}
    of_world = {name: given[name] for name in ("norm", "tested") if name in given}
    of_algorithm = {name: given[name] for name in given.keys() - of_run.keys() - of_world.keys()}
    task = world(**of_world)
    chosen = fedprior.algorithm("fedavg", task.network, **of_algorithm)
    check_useful(Settings(**of_run), chosen, task.network, 10, tested=len(task.data.test_y) > 0)


@pytest.mark.parametrize("case", IDLE)
def test_a_setting_without_effect_is_refused_and_accepted_once_it_has_one(case: str) -> None:
    idle, fellow, words = IDLE[case]
    with pytest.raises(SettingError, match=words) as caught:
        asked(idle)
    assert " has no effect: " in str(caught.value)
    assert "\n" not in str(caught.value)
    asked({**idle, **fellow})


def test_every_refusal_has_a_case_and_defaults_are_never_refused() -> None:
    refusing = {name for name, option in RUN_OPTIONS.items() if option.about.idle is not fedprior.core.options._acts}
    assert refusing <= {name for idle, _, _ in IDLE.values() for name in idle}
    asked({name: option.default for name, option in RUN_OPTIONS.items()})


def test_choices_are_the_ones_that_the_code_knows() -> None:
    assert tuple(attack.ATTACKS) == ATTACKS
    assert tuple(precision.FORMATS) == PRECISIONS
    assert RUN_OPTIONS["statistics"].about.choices == statistics.KINDS
    assert RUN_OPTIONS["report_statistics"].about.choices == statistics.REPORTS


def test_every_setting_is_described_and_has_a_valid_default() -> None:
    for name, option in RUN_OPTIONS.items():
        assert option.about.what, name
        assert plain(option.default) is not None
    Settings()


def test_the_documentation_has_the_settings_as_they_are() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "fill_settings.py"))
    shown = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` | " in shown for name in RUN_OPTIONS)
    assert script["filled"](shown) == shown, "run python scripts/fill_settings.py"


def test_no_setting_of_a_run_has_the_name_of_one_of_an_algorithm() -> None:
    """`--set` finds by its name whose setting is meant."""
    for name in fedprior.ALGORITHMS:
        assert not RUN_OPTIONS.keys() & algorithm_settings(name, {}).keys(), name
