"""Any torch optimiser, written as a call, stepping a stacked cohort as it would step each client alone."""

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprior.core.errors import SettingError
from fedprior.core.optimisers import NOT_ELEMENTWISE, UNUSABLE, Optimiser, TreeOptimiser
from fedprior.core.trees import Tree

TORCHS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
)
ELEMENTWISE = [name for name in TORCHS if name not in UNUSABLE and name not in NOT_ELEMENTWISE]
# Settings that switch on what an optimiser can do beyond its default.
VARIANTS = {
    "SGD": ["SGD(lr=0.1)", "SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)", "SGD(lr=0.1, maximize=True)"],
    "Adam": ["Adam(lr=0.1)", "Adam(lr=0.1, amsgrad=True, weight_decay=0.01)"],
    "AdamW": ["AdamW(lr=0.1, weight_decay=0.1)", "AdamW(lr=0.1, amsgrad=True)"],
    "Adagrad": ["Adagrad(lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2)"],
    "RMSprop": ["RMSprop(lr=0.1)", "RMSprop(lr=0.1, momentum=0.9, centered=True)"],
    "NAdam": ["NAdam(lr=0.1)", "NAdam(lr=0.1, decoupled_weight_decay=True, weight_decay=0.1)"],
    "RAdam": ["RAdam(lr=0.1)", "RAdam(lr=0.1, decoupled_weight_decay=True, weight_decay=0.1)"],
    "ASGD": ["ASGD(lr=0.1, t0=2.0, lambd=0.01)"],
}
CASES = [text for name in ELEMENTWISE for text in VARIANTS.get(name, [f"{name}(lr=0.1)"])]


def tree(seed: int, *lead: int) -> Tree:
    draw = torch.Generator().manual_seed(seed)
    return {
        "weights": {"w": torch.randn(*lead, 3, 2, generator=draw), "b": torch.randn(*lead, 3, generator=draw)},
        "thresholds": {"w": torch.randn(*lead, 4, generator=draw)},
    }


def same(a: Tree, b: Tree) -> bool:
    return all(torch.equal(a[section][name], b[section][name]) for section in b for name in b[section])


# ---------------------------------------------------------------------- written as a call


@pytest.mark.parametrize("text", [*CASES, "Adam(lr=0.001, betas=(0.9, 0.99))", "SGD()", "Adafactor(lr=0.01)"])
def test_optimisers_survive_printing_and_parsing(text):
    optimiser = Optimiser.parse(text)
    assert str(optimiser) == text
    assert Optimiser.parse(str(optimiser)) == optimiser


@settings(max_examples=50, deadline=None)
@given(
    lr=st.floats(0, 10, allow_subnormal=True),
    momentum=st.floats(0, 1),
    flags=st.fixed_dictionaries({"maximize": st.booleans()}),
)
def test_settings_survive_being_written(lr, momentum, flags):
    optimiser = Optimiser("SGD", {"lr": lr, "momentum": momentum, **flags})
    assert Optimiser.parse(f"  {optimiser} ") == optimiser


def test_a_bare_name_has_torchs_defaults():
    assert Optimiser.parse("Adam") == Optimiser("Adam")
    assert Optimiser.parse("Adam").lr == 1e-3
    assert Optimiser.parse("SGD(lr=0.05)").lr == 0.05


def test_build_passes_every_setting_to_torch():
    built = Optimiser.parse("Adam(lr=0.25, betas=(0.5, 0.75), eps=0.125)").build([torch.zeros(2)])
    assert isinstance(built, torch.optim.Adam)
    group = built.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.5, 0.75), 0.125)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "0.05",
        "SGD(0.05)",
        "SGD(lr=)",
        "SGD(lr=0.05",
        "SGD lr=0.05",
        "SGD(lr=fast)",
        "SGD(lr=__import__('os').getpid())",
        "torch.optim.SGD(lr=0.05)",
        "SGD(lr=0.05)(lr=0.05)",
        "SGD(*[0.05])",
        "SGD(**{'lr': 0.05})",
        "SGD(lr=0.05, lr=0.06)",
        "SGD(lr={[]: 1})",
        "lambda: SGD(lr=0.05)",
        "SGD(lr=0.05); SGD(lr=0.05)",
        "sgd(lr=0.05)",
        "Optimizer(lr=0.05)",
        "lr_scheduler",
        "Adamm(lr=0.05)",
        "SGD(lr=-1)",
        "SGD(lr=1e999)",
        "SGD(lr=0.1, weight_decay=1e999)",
        "SGD(lr='fast')",
        "SGD(lr=None)",
        "SGD(learning_rate=0.05)",
        "SGD(lr=0.05, nesterov=True)",
        "Adam(betas=(0.9,))",
        "Adam(betas=0.9)",
        "Adam(betas=(0.9, 2))",
        "SGD\0",
        "(" * 3000,
        "SGD(lr=" + "-" * 5000 + "1)",
    ],
    ids=lambda text: repr(text[:30]),
)
def test_invalid_text_is_a_setting_error(text):
    with pytest.raises(SettingError):
        Optimiser.parse(text)


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_optimisers_are_refused_with_a_reason(name):
    with pytest.raises(SettingError, match=f"{name} cannot be used here: it "):
        Optimiser(name)


def test_a_setting_error_says_what_torch_said():
    with pytest.raises(SettingError, match=r"SGD\(lr=-1\): Invalid learning rate"):
        Optimiser.parse("SGD(lr=-1)")


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_random_text_is_refused_or_an_optimiser(text):
    with contextlib.suppress(SettingError):
        assert isinstance(Optimiser.parse(text), Optimiser)


# ---------------------------------------------------------------------- stacked is separate


def grads_for(step: int, seed: int) -> Tree:
    """Signs change, sizes range over decades, some are zero: what tells the optimisers apart."""
    draw = torch.Generator().manual_seed(1000 * seed + step)
    out = tree(7 * step + seed)
    for section in out.values():
        for name, value in section.items():
            scale = 10.0 ** torch.randint(-3, 3, value.shape, generator=draw)
            section[name] = value * scale * (torch.rand(value.shape, generator=draw) > 0.2)
    return out


def stack(trees: list[Tree]) -> Tree:
    return {s: {n: torch.stack([t[s][n] for t in trees]) for n in trees[0][s]} for s in trees[0]}


def deviation(text: str, steps: int = 6) -> float:
    """The largest difference between a stacked step and separate ones, relative to the movement."""
    optimiser = Optimiser.parse(text)
    clients = [tree(seed) for seed in range(4)]
    alone = [TreeOptimiser({"weights": optimiser}, client) for client in clients]
    together = TreeOptimiser({"weights": optimiser}, stack(clients))
    for step in range(steps):
        grads = [grads_for(step, seed) for seed in range(4)]
        together.step(stack(grads))
        for one, grad in zip(alone, grads, strict=True):
            one.step(grad)
    separate = stack([one.values for one in alone])["weights"]
    moved = max(float((separate[n] - stack(clients)["weights"][n]).abs().max()) for n in separate)
    assert moved > 1e-3
    return max(float((together.values["weights"][n] - separate[n]).abs().max()) for n in separate) / moved


@pytest.mark.parametrize("text", CASES)
def test_one_step_of_a_stack_is_one_step_of_each(text):
    assert deviation(text) < 1e-5


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("text", CASES)
def test_joining_a_section_gives_torchs_optimiser_on_each_tensor(text, rows):
    """Values, the moments by name, and going on from moments that were written down."""
    optimiser = Optimiser.parse(text)
    lead = () if rows == 1 else (rows,)
    start = tree(0, *lead)["weights"]
    ours = TreeOptimiser({"weights": optimiser}, {"weights": start}, rows)
    theirs = {name: value.clone() for name, value in start.items()}
    built = {name: optimiser.build([value]) for name, value in theirs.items()}
    for step in range(4):
        if step == 2:
            written = ours.state()
            ours = TreeOptimiser({"weights": optimiser}, ours.values, rows)
            ours.load_state(written)
        grads = tree(10 + step, *lead)["weights"]
        ours.step({"weights": grads})
        for name, value in theirs.items():
            value.grad = grads[name].clone()
            built[name].step()
    torch.testing.assert_close(ours.values["weights"], theirs, rtol=1e-5, atol=1e-6)
    moments = {f"{k}/{n}": v for n, one in built.items() for k, v in one.state_dict()["state"].get(0, {}).items()}
    state = ours.state()["weights"]
    assert state.keys() == moments.keys()
    for path, value in moments.items():
        if value is not None:
            torch.testing.assert_close(torch.as_tensor(state[path]), torch.as_tensor(value), rtol=1e-5, atol=1e-6)


def test_every_optimiser_of_torch_is_accounted_for():
    """A new one in torch must be tried by the test above, or be named as unusable or not elementwise."""
    tried = {text.split("(")[0] for text in CASES}
    assert tried | NOT_ELEMENTWISE | set(UNUSABLE) >= set(TORCHS)
    assert not tried & NOT_ELEMENTWISE


@pytest.mark.parametrize("name", sorted(NOT_ELEMENTWISE & set(TORCHS)))
def test_optimisers_listed_as_not_elementwise_are_not(name):
    """Otherwise they would be trained in turn for nothing."""
    optimiser = Optimiser(name, {"lr": 0.1})
    draw = torch.Generator().manual_seed(0)
    start, grads = torch.randn(2, 4, 3, generator=draw), torch.randn(2, 4, 3, generator=draw) * 3
    try:
        together = TreeOptimiser({"weights": optimiser}, {"weights": {"w": start}})
    except SettingError:
        return  # Muon takes matrices only, so a stack of matrices is refused outright
    together.step({"weights": {"w": grads * torch.tensor([1.0, 100.0])[:, None, None]}})
    alone = TreeOptimiser({"weights": optimiser}, {"weights": {"w": start[0]}})
    alone.step({"weights": {"w": grads[0]}})
    assert not torch.allclose(together.values["weights"]["w"][0], alone.values["weights"]["w"], atol=1e-4)


# ---------------------------------------------------------------------- sections and steps


@given(
    steps=st.integers(1, 40),
    momentum=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    dampening=st.sampled_from([0.0, 0.3]),
    nesterov=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_path_is_how_far_torch_descends_a_slope_of_one(steps, momentum, dampening, nesterov):
    if nesterov and (momentum == 0 or dampening):
        nesterov = False
    chosen = Optimiser("SGD", {"lr": 0.1, "momentum": momentum, "dampening": dampening, "nesterov": nesterov})
    place = torch.zeros(1, 1, dtype=torch.float64)
    optimiser = chosen.build([place])
    for _ in range(steps):
        place.grad = torch.ones_like(place)
        optimiser.step()
    assert float(chosen.path(torch.tensor(float(steps), dtype=torch.float64))) == pytest.approx(-float(place))


def test_steps_equal_the_textbooks():
    start = {"weights": {"w": torch.tensor([1.0, 2.0])}, "thresholds": {"w": torch.tensor([5.0])}}
    moving = TreeOptimiser({"weights": Optimiser("SGD", {"lr": 0.5, "momentum": 0.9})}, start)
    moving.step({"weights": {"w": torch.tensor([1.0, -2.0])}})
    assert moving.values["weights"]["w"].tolist() == pytest.approx([0.5, 3.0])
    moving.step({"weights": {"w": torch.tensor([0.0, 0.0])}})
    assert moving.values["weights"]["w"].tolist() == pytest.approx([0.5 - 0.45, 3.0 + 0.9])


def test_sections_have_their_own_optimisers_and_others_do_not_move():
    start = tree(0)
    both = {"weights": Optimiser("SGD", {"lr": 0.1}), "thresholds": Optimiser("Adamax", {"lr": 0.01})}
    moving = TreeOptimiser(both, start)
    grads = {s: {n: torch.ones_like(v) for n, v in part.items()} for s, part in start.items()}
    moving.step(grads)
    assert torch.allclose(moving.values["weights"]["w"], start["weights"]["w"] - 0.1)
    assert torch.allclose(moving.values["thresholds"]["w"], start["thresholds"]["w"] - 0.01)
    assert set(TreeOptimiser({"weights": both["weights"]}, start).values) == {"weights"}


def test_the_initial_tree_does_not_change():
    start, before = tree(0), tree(0)
    moving = TreeOptimiser({"weights": Optimiser("SGD", {"lr": 0.1})}, start)
    moving.step(grads_for(0, 0))
    assert same(start, before)
    assert not same(moving.values, {"weights": before["weights"]})


@pytest.mark.parametrize("text", CASES)
def test_gradients_do_not_change(text):
    grads, before = grads_for(0, 0), grads_for(0, 0)
    moving = TreeOptimiser({"weights": Optimiser.parse(text)}, tree(0))
    moving.step(grads)
    moving.step(grads)
    assert same(grads, before)


def test_load_replaces_values_and_keeps_moments():
    """Momentum from before the load still pushes after it."""
    moving = TreeOptimiser(
        {"weights": Optimiser("SGD", {"lr": 1.0, "momentum": 0.5})}, {"weights": {"w": torch.zeros(2)}}
    )
    moving.step({"weights": {"w": torch.tensor([1.0, 2.0])}})
    moving.load({"weights": {"w": torch.tensor([10.0, 10.0])}})
    moving.step({"weights": {"w": torch.zeros(2)}})
    assert moving.values["weights"]["w"].tolist() == [9.5, 9.0]


# ---------------------------------------------------------------------- state


@pytest.mark.parametrize("text", [*CASES, "Adafactor(lr=0.1)"])
@pytest.mark.parametrize("before", [0, 3])
def test_a_restored_state_continues_exactly(text, before):
    optimisers = {"weights": Optimiser.parse(text), "thresholds": Optimiser("Adamax", {"lr": 0.01})}
    unbroken = TreeOptimiser(optimisers, tree(0))
    for step in range(before):
        unbroken.step(grads_for(step, 0))
    resumed = TreeOptimiser(optimisers, unbroken.values)
    resumed.load_state(unbroken.state())
    for step in range(before, before + 4):
        unbroken.step(grads_for(step, 0))
        resumed.step(grads_for(step, 0))
        assert same(resumed.values, unbroken.values)


def test_a_state_is_a_snapshot():
    moving = TreeOptimiser({"weights": Optimiser("Adam", {"lr": 0.1})}, tree(0))
    moving.step(grads_for(0, 0))
    state = moving.state()
    kept = {path: value.clone() for path, value in state["weights"].items()}
    moving.step(grads_for(1, 0))
    assert all(torch.equal(value, kept[path]) for path, value in state["weights"].items())


def test_a_state_names_moments_and_parameters():
    moving = TreeOptimiser({"weights": Optimiser("Adam", {"lr": 0.1})}, {"weights": {"conv/1.w": torch.zeros(2)}})
    assert moving.state() == {"weights": {}}
    moving.step({"weights": {"conv/1.w": torch.tensor([1.0, 2.0])}})
    state = moving.state()["weights"]
    assert set(state) == {"step/conv/1.w", "exp_avg/conv/1.w", "exp_avg_sq/conv/1.w"}
    assert state["exp_avg/conv/1.w"].tolist() == pytest.approx([0.1, 0.2])
    assert state["exp_avg_sq/conv/1.w"].tolist() == pytest.approx([1e-3, 4e-3])
    assert float(state["step/conv/1.w"]) == 1
    other = TreeOptimiser({"weights": Optimiser("Adam", {"lr": 0.1})}, {"weights": {"conv/1.w": torch.zeros(2)}})
    other.load_state({"weights": state})
    assert other.state()["weights"]["exp_avg/conv/1.w"].tolist() == pytest.approx([0.1, 0.2])


def test_a_state_that_lacks_a_section_starts_it_afresh():
    fresh = TreeOptimiser({"weights": Optimiser("Adam", {"lr": 0.1})}, tree(0))
    loaded = TreeOptimiser({"weights": Optimiser("Adam", {"lr": 0.1})}, tree(0))
    loaded.load_state({})
    for moving in (fresh, loaded):
        moving.step(grads_for(0, 0))
    assert same(loaded.values, fresh.values)


def numbers_and_tensors(state: dict[str, Any]) -> bool:
    return all(isinstance(value, (torch.Tensor, int, float)) for value in state.values())


@pytest.mark.parametrize("text", CASES)
def test_a_state_holds_only_what_a_checkpoint_can_store(text):
    """Tensors and numbers, all finite and none missing: JSON and safetensors know nothing else."""
    moving = TreeOptimiser({"weights": Optimiser.parse(text)}, tree(0))
    moving.step(grads_for(0, 0))
    state = moving.state()["weights"]
    assert numbers_and_tensors(state)
    assert all(math.isfinite(v) for v in state.values() if not isinstance(v, torch.Tensor))


@pytest.mark.parametrize("wrong", ["betas=(1.0, 0.9)", "betas=(0.9, 1.0)", "betas=(-0.1, 0.9)", "eps=0.0", "lr=-1.0"])
def test_yogi_refuses_invalid_betas(wrong):
    with pytest.raises(SettingError):
        Optimiser.parse(f"Yogi({wrong})")
    assert Optimiser.parse("Yogi(lr=0.0, betas=(0.0, 0.0))").lr == 0
