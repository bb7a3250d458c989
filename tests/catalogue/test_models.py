"""The paper's networks, their initial weights, and which models federated training refuses."""

import math

import pytest
import torch
from torch import Tensor, nn

from fedprior.catalogue.models import INITIALISATIONS, LeNet5, LogisticRegression, ResNet18, ResNet20, initialise
from fedprior.catalogue.tasks import own_task
from fedprior.core.errors import ModelError, SettingError
from fedprior.core.trainable import check_trainable

# ---------------------------------------------------------------------- the networks


@pytest.mark.parametrize(
    ("model", "shape", "classes"),
    [
        (LeNet5(3, 32, 10), (3, 32, 32), 10),
        (LeNet5(1, 28, 62), (1, 28, 28), 62),
        (LeNet5(1, 16, 4), (1, 16, 16), 4),
        (ResNet20(classes=100), (3, 32, 32), 100),
        (ResNet20(channels=1, classes=7, groups=4), (1, 16, 16), 7),
        (ResNet20(channels=1, classes=7, norm="batch"), (1, 16, 16), 7),
        (LogisticRegression(784, 10), (1, 28, 28), 10),
        (LogisticRegression(5, 2), (5,), 2),
    ],
)
def test_outputs_have_a_row_per_example_and_a_column_per_class(model, shape, classes):
    out = model(torch.randn(2, *shape))
    assert out.shape == (2, classes)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize(
    ("model", "shape"),
    [(LeNet5(1, 16, 4), (1, 16, 16)), (ResNet20(classes=5), (3, 8, 8)), (LogisticRegression(9), (9,))],
)
def test_an_examples_output_does_not_depend_on_its_batch(model, shape):
    """In training as well: that is why the norms are group norms."""
    x = torch.randn(4, *shape)
    together = model.train()(x)
    assert torch.allclose(together, torch.cat([model(row[None]) for row in x]), atol=1e-5)
    check_trainable(model)


def test_resnet20_has_as_many_parameters_with_either_norm():
    counts = {norm: sum(p.numel() for p in ResNet20(norm=norm).parameters()) for norm in ("group", "batch")}
    assert counts == {"group": 278_324, "batch": 278_324}
    assert not any(isinstance(m, nn.GroupNorm) for m in ResNet20(norm="batch").modules())
    with pytest.raises(SettingError, match="norm must be group or batch, got 'layer'"):
        ResNet20(norm="layer")


def test_lenet5_is_the_network_that_the_papers_byte_counts_imply():
    model = LeNet5(1, 16, 4)
    x = torch.randn(3, 1, 16, 16)
    w = dict(model.named_parameters())
    h = torch.nn.functional.conv2d(x, w["conv1.weight"], w["conv1.bias"]).relu()
    h = torch.nn.functional.max_pool2d(h, 2)
    h = torch.nn.functional.conv2d(h, w["conv2.weight"], w["conv2.bias"]).relu()
    h = torch.nn.functional.max_pool2d(h, 2).reshape(3, -1)
    h = (h @ w["fc1.weight"].T + w["fc1.bias"]).relu()
    assert torch.allclose(model(x), h @ w["fc2.weight"].T + w["fc2.bias"], atol=1e-5)


def test_resnet20_halves_the_picture_twice_and_has_twenty_layers():
    model = ResNet20(classes=5)
    shapes = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, out: shapes.append(tuple(out.shape[1:])))
    model(torch.randn(1, 3, 16, 16))
    assert shapes == [(16, 16, 16)] * 3 + [(32, 8, 8)] * 3 + [(64, 4, 4)] * 3
    three_by_three = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    shortcuts = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
    assert (len(three_by_three) + 1, len(shortcuts)) == (20, 2)


# ---------------------------------------------------------------------- initial weights


def build() -> nn.Module:
    return LeNet5(1, 16, 4)


def weights(scheme: str, seed: int) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in initialise(build, scheme, seed).named_parameters()}


@pytest.mark.parametrize("scheme", INITIALISATIONS)
def test_weights_are_a_function_of_scheme_and_seed_alone(scheme):
    torch.manual_seed(123)
    first = weights(scheme, 5)
    torch.rand(17)
    second = weights(scheme, 5)
    other = weights(scheme, 6)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc1.weight"], other["fc1.weight"])


@pytest.mark.parametrize("scheme", INITIALISATIONS)
def test_initialising_does_not_touch_the_global_generator(scheme):
    torch.manual_seed(9)
    before = torch.get_rng_state()
    initialise(build, scheme, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_default_is_what_torch_would_have_drawn():
    torch.manual_seed(31)
    expected = build().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in weights("default", 31).items())


def test_glorot_is_uniform_between_its_bounds():
    found = weights("glorot", 0)
    for name, fan_in, fan_out in (("conv2", 32 * 25, 64 * 25), ("fc1", 64, 512)):
        bound = math.sqrt(6 / (fan_in + fan_out))
        w = found[f"{name}.weight"]
        assert 0.99 * bound < float(w.abs().max()) <= bound
        assert float(w.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert not found[f"{name}.bias"].any()


def test_he_is_normal_with_its_variance():
    found = weights("he", 0)
    for name, fan_in in (("conv2", 32 * 25), ("fc1", 64)):
        w = found[f"{name}.weight"]
        assert float(w.std()) == pytest.approx(math.sqrt(2 / fan_in), rel=0.02)
        assert float((w.abs() > 2 * w.std()).float().mean()) == pytest.approx(0.0455, abs=0.005)
        assert not found[f"{name}.bias"].any()


def test_schemes_do_not_change_norms():
    for scheme in INITIALISATIONS:
        model = initialise(lambda: ResNet20(classes=5), scheme, 0)
        assert bool((model.norm.weight == 1).all())
        assert not model.norm.bias.any()


def test_schemes_reach_convolutions_of_all_dimensions_with_and_without_bias():
    model = initialise(lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Conv3d(1, 2, 2, bias=False)), "glorot", 0)
    assert not model[0].bias.any()
    assert float(model[0].weight.detach().abs().max()) <= math.sqrt(6 / (6 + 9))
    assert float(model[1].weight.detach().abs().max()) <= math.sqrt(6 / (8 + 16))


def test_an_unknown_scheme_is_refused_with_the_known_ones():
    with pytest.raises(SettingError, match=r"default, glorot, he.*'xavier'"):
        initialise(build, "xavier", 0)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("norm", "reason", "remedy"),
    [
        (nn.BatchNorm2d(4, track_running_stats=False), "stores no statistics", "track_running_stats=True"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "running statistics", "track_running_stats=False"),
    ],
    ids=str,
)
def test_meaningless_statistics_are_refused_with_reason_and_alternative(norm, reason, remedy):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(nn.ReLU(), norm))
    with pytest.raises(ModelError) as refusal:
        check_trainable(model)
    text = str(refusal.value)
    assert "'1.1'" in text
    assert type(norm).__name__ in text
    assert reason in text
    assert remedy in text


NORMS = [nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm2d(4), nn.Identity()]
BATCH_NORMS = [
    nn.BatchNorm1d(4),
    nn.BatchNorm2d(4, affine=False),
    nn.BatchNorm3d(4, momentum=None),
    nn.SyncBatchNorm(4),
]


@pytest.mark.parametrize("norm", [*NORMS, *BATCH_NORMS])
def test_other_norms_are_accepted(norm):
    check_trainable(nn.Sequential(nn.Conv2d(1, 4, 3), norm))


def test_a_model_with_nothing_to_train_is_refused():
    for model in (nn.Sequential(nn.ReLU()), nn.Linear(3, 2).requires_grad_(False)):
        with pytest.raises(ModelError, match="no trainable parameters"):
            check_trainable(model)


def test_resnet18_is_the_one_of_the_field():
    """Torchvision's has 11,689,512 parameters with a 7×7 stem and 1,000 classes; the stem for 32×32 images is 3×3."""
    counts = [sum(p.numel() for p in ResNet18(classes=classes).parameters()) for classes in (10, 100, 1000)]
    assert counts[:2] == [11_173_962, 11_220_132]
    assert counts[2] - 64 * 3 * 9 == 11_689_512 - 64 * 3 * 49
    assert ResNet18()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert [tuple(block.conv1.stride) for block in ResNet18().blocks] == [(1, 1), (1, 1), *[(2, 2), (1, 1)] * 3]


def test_a_model_that_is_partly_frozen_can_be_trained():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    check_trainable(model)


def test_a_parameter_with_a_slash_in_its_name_is_refused():
    """Paths in a checkpoint are names with slashes between them."""
    inner = nn.Sequential(nn.Linear(3, 2))
    inner[0].extra = nn.ParameterDict({"a/b": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"parameter '0\.extra\.a/b' has a slash in its name"):
        check_trainable(inner)
    with pytest.raises(ModelError, match="slash"):
        own_task(nn.ModuleDict({"in/out": nn.Linear(3, 2)}), [(torch.zeros(4, 3), torch.zeros(4).long())])
