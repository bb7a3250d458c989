"""Learning rates by the round: torch's own schedulers as the truth, and runs in which every step has seen them."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

import fedprior
from fedprior.core import keys, trees
from fedprior.core.errors import SettingError
from fedprior.core.keys import Purpose, Turn
from fedprior.core.optimisers import Optimiser, TreeOptimiser
from fedprior.core.schedules import Curve, Rates
from fedprior.core.settings import Settings
from fedprior.engines.batches import ClientBatches, Workload
from fedprior.engines.build import build
from fedprior.engines.stacked.together import Together

ROUNDS = 24
TORCH = {
    "constant": lambda o, left: lr_scheduler.ConstantLR(o, factor=1.0),
    "linear(end=0.2)": lambda o, left: lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=left),
    "linear": lambda o, left: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=left),
    "cosine": lambda o, left: lr_scheduler.CosineAnnealingLR(o, left),
    "cosine(end=0.1)": lambda o, left: lr_scheduler.CosineAnnealingLR(o, left, eta_min=0.1),
    "step(every=7)": lambda o, left: lr_scheduler.StepLR(o, 7, 0.1),
    "step(every=5, factor=0.5)": lambda o, left: lr_scheduler.StepLR(o, 5, 0.5),
    "exponential(factor=0.9)": lambda o, left: lr_scheduler.ExponentialLR(o, 0.9),
}


@pytest.mark.parametrize("warmup", [0, 1, 6])
@pytest.mark.parametrize("text", TORCH)
def test_factors_equal_torchs(text, warmup):
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    after = TORCH[text](optimiser, ROUNDS - warmup)
    if warmup:
        grows = lr_scheduler.LinearLR(optimiser, 1 / (warmup + 1), 1.0, total_iters=warmup)
        after = lr_scheduler.SequentialLR(optimiser, [grows, after], milestones=[warmup])
    given = (text[:-1] + f", warmup={warmup})" if "(" in text else f"{text}(warmup={warmup})") if warmup else text
    for number in range(1, ROUNDS + 1):
        assert Curve.parse(given).at(number, ROUNDS) == pytest.approx(optimiser.param_groups[0]["lr"], abs=1e-12)
        optimiser.step()
        after.step()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adamax", "Adagrad", "RMSprop", "NAdam", "RAdam", "Yogi"])
def test_an_optimiser_equals_torchs_with_a_scheduler(name):
    """Moments are kept from round to round and only the rate changes, as a scheduler has it."""
    start = torch.linspace(-1, 1, 12, dtype=torch.float64)
    described = Optimiser(name, {"lr": 0.1})
    ours = TreeOptimiser({"w": described}, {"w": {"a": start[:5], "b": start[5:]}})
    theirs = start.clone()
    plain = described.build([theirs])
    schedule = lr_scheduler.CosineAnnealingLR(plain, 10)
    for number in range(1, 11):
        slope = torch.sin(start * number)
        ours.scale(Curve.parse("cosine").at(number, 10))
        ours.step({"w": {"a": slope[:5], "b": slope[5:]}})
        theirs.grad = slope
        plain.step()
        schedule.step()
    torch.testing.assert_close(torch.cat(list(ours.values["w"].values())), theirs, rtol=0, atol=1e-12)


def test_fedopt_with_both_schedules_is_a_plain_torch_loop(small_task):
    """Clients with a scheduler that knows the round, a server with one of torch's."""
    task, rounds = small_task((6, 6, 6, 6), dtype=torch.float64), 6
    chosen = fedprior.algorithm(
        "fedadam", task.network, local_optimiser="SGD(lr=0.2, momentum=0.5)", server_optimiser="Adam(lr=0.05)"
    )
    settings = {"lr_schedule": "linear(end=0.1)", "server_lr_schedule": "cosine(warmup=2)"}
    result = fedprior.run(task, chosen, rounds=rounds, clients_per_round=2, **settings)

    server = copy.deepcopy(task.network.module)
    optimiser = torch.optim.Adam(server.parameters(), lr=0.05)
    grows = lr_scheduler.LinearLR(optimiser, 1 / 3, 1.0, total_iters=2)
    falls = lr_scheduler.CosineAnnealingLR(optimiser, rounds - 2)
    schedule = lr_scheduler.SequentialLR(optimiser, [grows, falls], milestones=[2])
    for number in range(1, rounds + 1):
        turn = Turn(keys.key(0), number)
        moved = []
        for client in keys.choose(turn.key(Purpose.COHORT), 4, 2):
            local = copy.deepcopy(server)
            descent = torch.optim.SGD(local.parameters(), lr=0.2 * (1 - 0.9 * (number - 1) / rounds), momentum=0.5)
            batch_key = turn.of(client).key(Purpose.BATCHES)
            for batch in ClientBatches(task.data, client, Workload(4, 1), batch_key):
                descent.zero_grad()
                F.cross_entropy(local(batch.x), batch.y).backward()
                descent.step()
            moved.append(list(local.parameters()))
        for place, p in enumerate(server.parameters()):
            p.grad = (p - (moved[0][place] + moved[1][place]) / 2).detach()
        optimiser.step()
        schedule.step()
    for name, value in server.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], value, rtol=0, atol=1e-9)


SCHEDULED = {"lr_schedule": "cosine(warmup=1)", "rounds": 4}
SERVED = {**SCHEDULED, "server_lr_schedule": "step(every=2, factor=0.3)"}
CASES = {
    "fedavg": ({}, SCHEDULED),
    "fedmedian": ({"precision": 0.5}, SCHEDULED),
    "scaffold": ({"local_optimiser": "SGD(lr=0.1, momentum=0.9)"}, SCHEDULED),
    "fedadam": ({}, SERVED),
    "fedsparse+scaffold": ({"temperature": 0.05, "lambda0": 1e-3}, SERVED),
}


def simulate(task, name, options, settings):
    chosen = fedprior.algorithm(name, task.network, **options)
    every = {"clients_per_round": 3, "batch_size": 4, "device": "cpu", **settings}
    return build(chosen, task.network, task.data, Settings(**every))


@pytest.mark.parametrize("name", CASES)
def test_vectorised_equals_in_turn(small_task, name):
    options, settings = CASES[name]
    task = small_task(dtype=torch.float64)
    together, alone, flat = (simulate(task, name, options, s) for s in (settings, settings, {"rounds": 4}))
    engine = Together([together])
    for _ in range(4):
        engine.step(evaluate=False)
        alone.step(evaluate=False)
        flat.step(evaluate=False)
    apart = 0.0
    for (path, one), (_, other), (_, constant) in zip(
        trees.leaves(together.server), trees.leaves(alone.server), trees.leaves(flat.server), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9, msg=path)
        apart = max(apart, float((other - constant).abs().max()))
    assert apart > 1e-3, "the schedule matters"


def test_the_median_pulls_with_the_rate_of_the_round(small_task):
    """A step lr · g against a pull lr · λ: which weights move does not depend on the rate, if both have the same."""
    task, moved = small_task((4, 4, 4), dtype=torch.float64), []
    for schedule in ("constant", "constant(warmup=99)"):
        sim = simulate(task, "fedmedian", {"precision": 0.02}, {"rounds": 100, "lr_schedule": schedule})
        sim.step(evaluate=False)
        moved.append({name: sim.server["weights"][name] != value for name, value in task.network.params().items()})
    for name, which in moved[0].items():
        assert torch.equal(moved[1][name], which), name
    assert 0.1 < torch.cat([which.flatten() for which in moved[0].values()]).double().mean() < 0.9


def test_controls_are_gradients_whatever_the_rate(small_task):
    """One step of SCAFFOLD from the same point: c_s is that step's gradient, unless read at another rate."""
    task = small_task((4, 4, 4), dtype=torch.float64, clients_per_round=3)
    controls = []
    for schedule in ("constant", "constant(warmup=99)"):
        sim = simulate(task, "scaffold", {}, {"rounds": 100, "lr_schedule": schedule})
        sim.step(evaluate=False)
        controls.append(sim.server["control"])
    for name, value in controls[0].items():
        torch.testing.assert_close(controls[1][name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fedadam", "fedsparse+scaffold"])
def test_a_resumed_run_continues_its_schedules(small_task, tmp_path, name):
    options, settings = CASES[name]
    task = small_task()
    chosen = fedprior.algorithm(name, task.network, **options)
    whole = fedprior.run(task, chosen, **settings)
    out = tmp_path / "run"

    class Stop(Exception):
        pass

    def stop(record):
        if record["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        fedprior.run(task, chosen, out=out, progress=stop, checkpoint_every=1, **settings)
    assert 'lr_schedule = "cosine(warmup=1)"' in (out / "config.toml").read_text()
    resumed = fedprior.resume(out, task=task, algorithm=chosen)
    assert resumed.records == whole.records
    found, expected = (dict(trees.leaves(result.simulation.server)) for result in (resumed, whole))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert torch.equal(found[path], value), path


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cosin", r"a schedule is one of constant, linear\(end=0\), .*got 'cosin'"),
        ("cosine(0.1)", "a schedule is one of"),
        ("cosine(start=1)", "a schedule is one of"),
        ("step", "a schedule is one of"),
        ("step(every=0)", "every must be a whole number of at least 1, got 0"),
        ("exponential(factor=0)", "factor must be above 0 and at most 1, got 0"),
        ("cosine(end=2)", "end must be at least 0 and at most 1, got 2"),
        ("linear(warmup=-1)", "warmup must be a whole number of at least 0, got -1"),
        ("", "a schedule is one of"),
        ("__import__('os')", "a schedule is one of"),
    ],
)
def test_a_wrong_schedule_is_a_one_line_error(text, line):
    for setting in ("lr_schedule", "server_lr_schedule"):
        with pytest.raises(SettingError, match=line) as error:
            Settings(**{setting: text})
        assert "\n" not in str(error.value)


def test_without_a_learning_rate_a_schedule_is_refused(small_task):
    task = small_task()
    with pytest.raises(SettingError, match="the M-step of fedavg has no learning rate; give it a server_optimiser"):
        fedprior.run(task, "fedavg", server_lr_schedule="cosine")
    chosen = fedprior.algorithm("fedavg", task.network, local_optimiser="Rprop(lr=0.01)")
    with pytest.raises(SettingError, match="Rprop chooses its own steps"):
        fedprior.run(task, chosen, lr_schedule="cosine")


def test_after_the_last_round_the_rate_stays():
    rates = Rates("cosine", "linear", 8)
    assert rates.at(9) == rates.at(8)
    assert 0 < rates.at(8).local == pytest.approx((1 + math.cos(math.pi * 7 / 8)) / 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("server", ["Adam(lr=0.01)", "Adamax(lr=0.01)", "SGD(lr=0.5, momentum=0.9)", "Yogi(lr=0.01)"])
@pytest.mark.parametrize("local", ["SGD(lr=0.1, momentum=0.9)", "Adam(lr=0.01)", "NAdam(lr=0.01)", "RMSprop(lr=0.01)"])
def test_a_captured_round_reads_its_rates_at_each_replay(small_task, local, server):
    """In a CUDA graph a rate that were a number would stay that of the round that was captured."""
    task = small_task((8, 8, 8, 8))
    options = {"local_optimiser": local, "server_optimiser": server}
    settings = {**SERVED, "rounds": 8, "device": "cuda", "arithmetic": "float32"}
    captured, plain = (simulate(task, "fedavg", options, settings) for _ in range(2))
    engines = Together([captured], capture=True), Together([plain])
    for _ in range(8):
        for engine in engines:
            engine.step(evaluate=False)
    for (path, one), (_, other) in zip(trees.leaves(captured.server), trees.leaves(plain.server), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4, msg=path)
